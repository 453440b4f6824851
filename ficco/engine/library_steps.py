"""What a library does in a repeated call, as steps that native code makes around its launches.

    work     gemm x.w -> y[2:5]               a product of two matrices into rows of a result
    steps    y[2:5] -> part                   parts of matrices, made once in a call
             mm(x, w, out=part)

Parts of windows are the same in every call, so they are values and no steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import getitem
from typing import Any

from ficco.engine.compute import DeviceCompute
from ficco.engine.library_calls import View, step_of
from ficco.engine.repeated_calls import CallSteps, Step
from ficco.plan import Buffer, Region
from ficco.program import Gemm, Reduce, Sum, Work, operands_of


def has_steps(work: Work) -> bool:
    """Return whether `LibrarySteps` can enqueue a work: the number of its elements is fixed."""
    return isinstance(work, (Gemm, Reduce, Sum))


class LibrarySteps:
    """Plans the steps of a call on one window copy.

    Args:
        names: buffers whose matrices are the inputs of the steps, in this order.
        buffers: of the program, by name.
        windows: names of the buffers that are in the window.
        window: returns the handle of a region of the window.
        compute: the library of the matrices.
        dtype: of the call's results.
    """

    def __init__(
        self, names: Sequence[str], buffers: Mapping[str, Buffer], windows: Mapping[str, int],
        window: View, compute: DeviceCompute, dtype: str,
    ) -> None:  # fmt: skip
        self._inputs, self._buffers, self._windows = len(names), buffers, windows
        self._window, self._compute, self._dtype = window, compute, dtype
        self._matrices = {name: place for place, name in enumerate(names)}
        self._parts: dict[Region, int] = {}  # places
        self._more: list[Any] = []  # the values after the inputs
        self._steps: list[Step] = []

    @property
    def count(self) -> int:
        """Number of steps so far."""
        return len(self._steps)

    def add(self, work: Work) -> None:
        """Add the steps that enqueue a work."""
        alike = all(self._buffers[r.buffer].dtype == self._dtype for r in operands_of(work))
        self._steps.append(step_of(work, self._place, self._compute, self._dtype, alike))

    def call_steps(self) -> CallSteps:
        """Return all steps."""
        return CallSteps(self._inputs, self._more, self._steps, [])

    def _value(self, value: Any = None) -> int:
        """Return the place of a value; None: a step stores it."""
        self._more.append(value)
        return self._inputs + len(self._more) - 1

    def _place(self, region: Region) -> int:
        """Return the place of a region's matrix; add the steps that make it."""
        if region not in self._parts:
            fixed = region.buffer in self._windows
            self._parts[region] = self._value(self._window(region)) if fixed else self._part(region)
        return self._parts[region]

    def _part(self, region: Region) -> int:
        whole, buffer = self._matrix(region.buffer), self._buffers[region.buffer]
        rows, columns = slice(region.row0, region.row1), slice(region.col0, region.col1)
        if region.cols != buffer.cols:
            index: Any = (rows, columns)
        elif region.rows != buffer.rows:
            index = rows
        else:
            return whole
        place, made = self._value(index), self._value()
        self._steps.append(Step(getitem, (whole, place), made))
        return made

    def _matrix(self, name: str) -> int:
        """Return the place of a matrix that is passed, or else allocated by a step."""
        if name not in self._matrices:
            buffer, made = self._buffers[name], self._value()
            new = partial(self._compute.empty, buffer.rows, buffer.cols, buffer.dtype)
            self._steps.append(Step(new, (), made))
            self._matrices[name] = made
        return self._matrices[name]
