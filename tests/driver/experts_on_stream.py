"""Rows of experts on GPUs of the driver's test double: what their launches do, by NumPy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ficco.engine.compute import dtype_of, experts
from ficco.kernels.records import Operands, Setting
from ficco.plan import Experts, Region, window_places

__all__ = ["ExpertRows"]


class ExpertRows:
    """A work of experts, and the addresses of all ranks' windows."""

    def __init__(self, work: Experts, setting: Setting) -> None:
        self.work, self.rank, self.data = work, work.routing.rank, setting.windows.data
        self.buffers = setting.buffers
        self.places, _ = window_places(tuple(setting.buffers.values()))

    def run(self, given: Operands, copy: int) -> None:
        """Do a call's work, with its operands by the names of the record."""
        work, routing = self.work, np.asarray(given["routing"])[0]
        if work.weight is None:
            experts.perform(work, self.rank, routing, None, [given["rows"]], [given["y"]])
            return
        w = np.asarray(given["w"])
        if work.mode == "return":
            targets = [
                given["y"] if target.rank == self.rank else self._window(target, copy)
                for target in work.targets
            ]
            experts.perform(work, self.rank, routing, w, [given["x"]], targets)
            return
        sources = [
            given["x"] if region.buffer == "x" else given["gathered"][region.row0 : region.row1]
            for region in work.sources
        ]
        experts.perform(work, self.rank, routing, w, sources, [given["y"]] * len(sources))

    def _window(self, region: Region, copy: int) -> Any:
        buffer = self.buffers[region.buffer]
        kind = dtype_of(buffer.dtype)
        address = self.data[copy][region.rank] + self.places[region.buffer]
        memory = (ctypes.c_uint8 * (region.rows * buffer.cols * kind.itemsize)).from_address(
            address
        )
        return np.frombuffer(memory, np.uint8).view(kind).reshape(region.rows, buffer.cols)
