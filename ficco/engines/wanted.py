"""What a plan launches of ficco's own kernels, worked out without a GPU and before any call.

On arrays without memory, whose addresses and pitches 16 divides where their sizes allow: as those
of nearly all calls are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ficco.compute import (
    GatedOperands,
    OneKernelOperands,
    OneKernelOutput,
    OneKernelWindows,
    SumOperands,
)
from ficco.compute.own_kernels import OwnKernels
from ficco.engines.gating import launches_of
from ficco.engines.one_kernel import is_one_launch, table_of
from ficco.engines.work import sum_of
from ficco.kernels import gated
from ficco.kernels.arrays import Address, Arrays, Described, DescribedArrays
from ficco.kernels.tiling import Tile
from ficco.kernels.variants import Launch
from ficco.plan import RankPlan, Region

__all__ = [
    "DescribedKernels",
    "gated_launches",
    "launches_in",
    "matrix",
    "whole_launch",
]

_ADDRESS = 1 << 40  # that 16 divides, as do all addresses of allocations
_WORDS = Address(_ADDRESS)


class DescribedKernels(OwnKernels):
    """Works launches out on arrays without memory."""

    def __init__(self, capability: int, processors: int) -> None:
        self._arrays = DescribedArrays(capability, processors)

    def arrays(self) -> Arrays:
        """See `OwnKernels.arrays`."""
        return self._arrays

    def check_allocates(self) -> None:
        """See `OwnKernels.check_allocates`: nothing is allocated."""


def matrix(rows: int, cols: int, dtype: str, turned: bool = False) -> Described:
    """Return a matrix whose rows, or columns if it is turned, lie one behind another."""
    if turned:
        return matrix(cols, rows, dtype).T
    return Described(_ADDRESS, (rows, cols), (cols, 1), dtype)


def launches_in(plan: RankPlan, kernels: OwnKernels) -> Iterator[Launch]:
    """Yield all launches of a plan, for either weight layout."""
    if is_one_launch(plan):
        table, _ = table_of(plan)
        for turned in (True, False):
            yield _one_kernel(plan, table, kernels, turned)
        return
    yield from gated_launches(plan, kernels, (True, False))
    for step in plan.steps:
        found = sum_of(step.reads, step.writes[0]) if step.kind == "reduce" else None
        if found is not None:
            view = _view(plan)
            operands = SumOperands(
                view(found.slots), view(found.own), found.bias and view(found.bias),
                view(found.target),
            )  # fmt: skip
            launch = kernels.sum_launch(operands, found.number, found.distance, found.own_at)
            if launch is not None:
                yield launch


def _view(plan: RankPlan) -> Any:
    """Return what gives a region of a buffer as a matrix."""
    buffers = {buffer.name: buffer for buffer in plan.buffers}

    def view(region: Region) -> Described:
        buffer = buffers[region.buffer]
        item = 4 if buffer.dtype == "float32" else 2
        at = _ADDRESS + (region.row0 * buffer.cols + region.col0) * item
        return Described(at, (region.rows, region.cols), (buffer.cols, 1), buffer.dtype)

    return view


def _one_kernel(plan: RankPlan, table: Any, kernels: OwnKernels, turned: bool) -> Launch:
    dtype = table.dtype
    columns = {buffer.name: buffer.cols for buffer in plan.buffers}
    outputs = []
    for each in table.outputs:
        n = columns[each.y]
        bias = matrix(1, n, dtype) if each.bias else None
        outputs.append(
            OneKernelOutput(matrix(table.k, n, dtype, turned), bias, matrix(table.m, n, dtype))
        )
    gathers = hasattr(table, "gathered")
    rows = table.own_rows if gathers else table.m
    kept = matrix(table.m, table.k, dtype) if gathers and table.kept else None
    operands = OneKernelOperands(matrix(rows, table.k, dtype), outputs, kept)
    return whole_launch(kernels, table, operands)


def gated_launches(
    plan: RankPlan, kernels: OwnKernels, ways: Sequence[bool], tile: Tile | None = None
) -> Iterator[Launch]:
    """Yield the launches of a plan's gated steps.

    Args:
        plan: of one rank.
        kernels: work launches out.
        ways: for each, whether columns of the weights lie one behind another.
        tile: how to cut them; None: as is best.
    """
    buffers = {buffer.name: buffer for buffer in plan.buffers}

    def described(region: Any) -> Described | None:
        if region is None:
            return None
        buffer = buffers[region.buffer]
        return matrix(buffer.rows, buffer.cols, buffer.dtype)

    for step in plan.steps:
        for each in launches_of(plan, step) if step.parts else ():
            prepared = kernels.prepare(
                each.parts, each.n, each.k, each.dtype, 1.0, lambda: 0, each.begun
            )
            if tile is not None:
                table = gated.prepare(
                    each.parts, each.n, each.k, each.dtype, kernels.arrays(), tile, each.begun
                )
                prepared = prepared._replace(table=table)
            for turned in ways:
                operands = GatedOperands(
                    described(each.own), described(each.window),
                    matrix(each.k, each.n, each.dtype, turned), described(each.bias),
                    described(each.c), described(each.partial), described(each.recv), _WORDS, 0,
                )  # fmt: skip
                launch = kernels.launch_of(prepared, operands)
                if launch is not None:
                    yield launch


def whole_launch(kernels: OwnKernels, table: Any, operands: OneKernelOperands) -> Launch:
    """Return the launch of a call that is one kernel."""
    nowhere = [[_ADDRESS] * table.world] * 2
    windows = OneKernelWindows(nowhere, nowhere, _ADDRESS)
    prepared = kernels.prepare_one_kernel(table, windows, 0, 1.0, _ADDRESS, lambda: _ADDRESS)
    return kernels.one_kernel_launch(prepared, operands)
