"""Launches of experts on GPUs of the driver's test double: what the kernels do, by NumPy.

Operands are those of the kernels: a peer's tokens are rows of one matrix of all tokens, and rows
return to addresses of windows.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ficco.engine.compute import dtype_of, experts
from ficco.kernels.experts_launches import wave_of
from ficco.kernels.records import Operands, Setting
from ficco.plan import Experts, Region, window_places


class ExpertsCall:
    """One rank's launches of a work."""

    def __init__(self, work: Experts, setting: Setting) -> None:
        self.work, self.rank, self.windows = work, work.routing.rank, setting.windows
        if work.mode == "gather":
            wave_of(work)  # kernels have no others
        places, _ = window_places(tuple(setting.buffers.values()))
        self.at = places.get(work.targets[0].buffer, 0)

    def run(self, operands: Operands, copy: int) -> None:
        """Do the work on a copy of the windows."""
        given = {name: np.asarray(each) for name, each in operands.items() if each is not None}
        work, weight = self.work, given.get("w")
        if work.mode == "gather":
            pairs = zip(work.sources, work.targets, strict=True)
            sources = [self._tokens(source, target.of, given) for source, target in pairs]
            targets = [given["y"]] * len(work.targets)
        elif work.mode == "return":
            sources = [given["x"]]
            targets = [self._returned(target, given, copy) for target in work.targets]
        else:
            sources, targets = [given["rows"]], [given["y"]]
        experts.perform(work, self.rank, given["routing"][0], weight, sources, targets)

    def _tokens(self, source: Region, of: int, given: dict[str, Any]) -> Any:
        if of == self.rank and "x" in given:
            return given["x"]
        return given["gathered"][source.row0 : source.row1]

    def _returned(self, target: Region, given: dict[str, Any], copy: int) -> Any:
        """Return the rows of an owner, in its window."""
        if target.rank == self.rank:
            return given["y"]
        kind = dtype_of(given["x"].dtype.name)
        address = self.windows.data[copy][target.rank] + self.at
        block = (ctypes.c_uint8 * (target.area * kind.itemsize)).from_address(address)
        return np.frombuffer(block, np.uint8).view(kind).reshape(target.rows, target.cols)
