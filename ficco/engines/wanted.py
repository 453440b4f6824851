"""The launches of ficco's own kernels in a plan, computed without a GPU and before any call.

Arrays have no memory. Their addresses and, if sizes allow, pitches are multiples of 16, as in
nearly all calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ficco.compute import (
    GatedOperands,
    OneKernelOperands,
    OneKernelOutput,
    OneKernelWindows,
    PoolOperands,
    SumOperands,
    WholeOperands,
)
from ficco.compute.own_kernels import OwnKernels
from ficco.kernels import gated
from ficco.kernels.arrays import Address, Arrays, Described, DescribedArrays
from ficco.kernels.variants import Launch
from ficco.passes import compile_plan
from ficco.plan import RankPlan, Region
from ficco.program import Gated, OneKernel, Pool, Sum
from ficco.tables import PoolTable
from ficco.target import cuda_target
from ficco.tiling import Tile

__all__ = [
    "DescribedKernels",
    "gated_launches",
    "launches_in",
    "matrix",
    "whole_launch",
]

_ADDRESS = 1 << 40  # a multiple of 16, as are all addresses of allocations
_WORDS = Address(_ADDRESS)


class DescribedKernels(OwnKernels):
    """Computes launches from arrays without memory."""

    def __init__(self, capability: int, processors: int) -> None:
        self._arrays = DescribedArrays(capability, processors)

    def arrays(self) -> Arrays:
        """See `OwnKernels.arrays`."""
        return self._arrays

    def check_allocates(self) -> None:
        """See `OwnKernels.check_allocates`: nothing is allocated."""


def matrix(rows: int, cols: int, dtype: str, turned: bool = False) -> Described:
    """Return a contiguous matrix in row-major order, or column-major if `turned`."""
    if turned:
        return matrix(cols, rows, dtype).T
    return Described(_ADDRESS, (rows, cols), (cols, 1), dtype)


def launches_in(plan: RankPlan, kernels: OwnKernels) -> Iterator[Launch]:
    """Yield all launches of a plan, for both weight layouts."""
    both = (True, False)
    view = _view(plan)
    for launch in compile_plan(plan, cuda_target()).launches:
        work = launch.work
        if isinstance(work, OneKernel):
            for turned in both:
                yield _one_kernel(plan, work.table, kernels, turned)
        elif isinstance(work, Gated):
            yield from _gated(plan, work, kernels, both)
        elif isinstance(work, Sum):
            operands = SumOperands(
                view(work.slots), view(work.own), work.bias and view(work.bias), view(work.target)
            )
            total = kernels.sum_launch(operands, work.number, work.distance, work.own_at)
            if total is not None:
                yield total
        elif isinstance(work, Pool):
            pooled = _pool(plan, work, kernels)
            if pooled is not None:
                yield pooled


def _pool(plan: RankPlan, work: Pool, kernels: OwnKernels) -> Launch | None:
    whole = {b.name: matrix(b.rows, b.cols, b.dtype) for b in plan.buffers}
    bags, view = work.bags, _view(plan)
    operands = PoolOperands(
        [view(bag.table) for bag in bags],
        [whole[bag.indices.buffer] for bag in bags],
        [whole[bag.bags.buffer] for bag in bags],
        view(work.target),
        [None if bag.weights is None else whole[bag.weights.buffer] for bag in bags],
    )
    prepared = kernels.prepare_pool(*work.sizes, plan.buffer(bags[0].table.buffer).dtype)
    return kernels.pool_launch(prepared, operands, bags[0].bags.col0)


def _view(plan: RankPlan) -> Any:
    """Return a function that maps a region of a buffer to a matrix."""
    buffers = {buffer.name: buffer for buffer in plan.buffers}

    def view(region: Region) -> Described:
        buffer = buffers[region.buffer]
        item = 4 if buffer.dtype == "float32" else 2
        at = _ADDRESS + (region.row0 * buffer.cols + region.col0) * item
        return Described(at, (region.rows, region.cols), (buffer.cols, 1), buffer.dtype)

    return view


def _one_kernel(plan: RankPlan, table: Any, kernels: OwnKernels, turned: bool) -> Launch:
    dtype = table.dtype
    if isinstance(table, PoolTable):
        whole = {b.name: matrix(b.rows, b.cols, b.dtype) for b in plan.buffers}
        pooled = PoolOperands.of_names(whole.__getitem__, table.modes)
        return whole_launch(kernels, table, pooled)
    columns = {buffer.name: buffer.cols for buffer in plan.buffers}
    outputs = []
    for names in table.outputs:
        n = columns[names.y]
        bias = matrix(1, n, dtype) if names.bias else None
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
        plan: the plan of one rank.
        kernels: computes the launches.
        ways: weight layouts; True: weights are column-major.
        tile: tile of the products; None: the best tile.
    """
    for launch in compile_plan(plan, cuda_target()).launches:
        if isinstance(launch.work, Gated):
            yield from _gated(plan, launch.work, kernels, ways, tile)


def _gated(
    plan: RankPlan,
    gemm: Gated,
    kernels: OwnKernels,
    ways: Sequence[bool],
    tile: Tile | None = None,
) -> Iterator[Launch]:
    """Yield a gated GEMM's launches, for these weight layouts."""

    def described(region: Region | None) -> Described | None:
        if region is None:
            return None
        buffer = plan.buffer(region.buffer)
        return matrix(buffer.rows, buffer.cols, buffer.dtype)

    prepared = kernels.prepare(gemm.parts, gemm.n, gemm.k, gemm.dtype, 1.0, lambda: 0, gemm.begun)
    if tile is not None:
        table = gated.prepare(
            gemm.parts, gemm.n, gemm.k, gemm.dtype, kernels.arrays(), tile, gemm.begun
        )
        prepared = prepared._replace(table=table)
    for turned in ways:
        operands = GatedOperands(
            described(gemm.own), described(gemm.window),
            matrix(gemm.k, gemm.n, gemm.dtype, turned), described(gemm.bias),
            described(gemm.c), described(gemm.partial), described(gemm.recv), _WORDS, 0,
        )  # fmt: skip
        launch = kernels.launch_of(prepared, operands)
        if launch is not None:
            yield launch


def whole_launch(kernels: OwnKernels, table: Any, operands: WholeOperands) -> Launch:
    """Return the launch of a call that is one kernel."""
    nowhere = [[_ADDRESS] * table.world] * 2
    windows = OneKernelWindows(nowhere, nowhere, _ADDRESS)
    prepared = kernels.prepare_one_kernel(table, windows, 0, 1.0, _ADDRESS, lambda: _ADDRESS)
    return kernels.one_kernel_launch(prepared, operands)
