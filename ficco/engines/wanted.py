"""What a plan launches of ficco's own kernels, worked out without a GPU and before any call.

On arrays without memory, whose addresses and pitches 16 divides where their sizes allow: as those
of nearly all calls are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from ficco.compute import DirectOperands, DirectOutput, DirectWindows, GatedOperands, SumOperands
from ficco.compute.own_kernels import OwnKernels
from ficco.engines.cuda import _is_one_launch, _table_of
from ficco.engines.gating import launches_of
from ficco.engines.work import sum_of
from ficco.kernels import gated, pack
from ficco.kernels.arrays import Address, Arrays, Described, DescribedArrays
from ficco.kernels.tiling import Tile
from ficco.kernels.variants import Launch, Variant, variant_of
from ficco.lowering import lower_rank
from ficco.plan import RankPlan, Region
from ficco.problem import Problem
from ficco.schedule import Schedule

__all__ = [
    "DescribedKernels",
    "GroupKernels",
    "gated_launches",
    "launches_in",
    "matrix",
    "missing",
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


def missing(plan: RankPlan, kernels: DescribedKernels) -> list[Variant]:
    """Return the variants that a plan's launches want and the pack lacks, for either weight layout.

    Either: whether rows or columns of the weights lie one behind another, calls alone say.
    """
    capability = kernels.arrays().capability
    wanted = {
        variant_of(launch)
        for turned in (True, False)
        for launch in launches_in(plan, kernels, turned)
    }
    return [each for each in sorted(wanted) if pack.find(each, capability) is None]


def launches_in(plan: RankPlan, kernels: OwnKernels, turned: bool) -> Iterator[Launch]:
    """Yield all launches of a plan. `turned`: columns of the weights lie one behind another."""
    if _is_one_launch(plan):
        table, _ = _table_of(plan)
        yield _direct(plan, table, kernels, turned)
        return
    yield from gated_launches(plan, kernels, turned)
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


def _direct(plan: RankPlan, table: Any, kernels: OwnKernels, turned: bool) -> Launch:
    dtype = table.dtype
    columns = {buffer.name: buffer.cols for buffer in plan.buffers}
    outputs = []
    for each in table.outputs:
        n = columns[each.y]
        bias = matrix(1, n, dtype) if each.bias else None
        outputs.append(
            DirectOutput(matrix(table.k, n, dtype, turned), bias, matrix(table.m, n, dtype))
        )
    gathers = hasattr(table, "gathered")
    rows = table.own_rows if gathers else table.m
    kept = matrix(table.m, table.k, dtype) if gathers and table.kept else None
    operands = DirectOperands(matrix(rows, table.k, dtype), outputs, kept)
    return whole_launch(kernels, table, operands)


def gated_launches(
    plan: RankPlan, kernels: OwnKernels, turned: bool, tile: Tile | None = None
) -> Iterator[Launch]:
    """Yield the launches of a plan's gated steps; `tile`: how to cut them, None: as is best."""
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
            operands = GatedOperands(
                described(each.own), described(each.window),
                matrix(each.k, each.n, each.dtype, turned), described(each.bias),
                described(each.c), described(each.partial), described(each.landing), _WORDS, 0,
            )  # fmt: skip
            launch = kernels.launch_of(prepared, operands)
            if launch is not None:
                yield launch


def whole_launch(kernels: OwnKernels, table: Any, operands: DirectOperands) -> Launch:
    """Return the launch of a call that is one kernel."""
    nowhere = [[_ADDRESS] * table.world] * 2
    windows = DirectWindows(nowhere, nowhere, _ADDRESS)
    prepared = kernels.prepare_direct(table, windows, 0, 1.0, _ADDRESS, lambda: _ADDRESS)
    return kernels.direct_launch(prepared, operands)


class GroupKernels(NamedTuple):
    """What a group's ranks can have.

    Attributes:
        reason: why they can have no kernels; "": they can.
        compiles: whether every rank can compile what the pack lacks.
        gpus: compute capability and multiprocessors of the ranks' GPUs, each pair once.
    """

    reason: str
    compiles: bool
    gpus: tuple[tuple[int, int], ...]

    def serve(self, problem: Problem, schedule: Schedule) -> bool:
        """Return whether all ranks can have the kernels of a call.

        What each rank finds in the pack is worked out for all ranks, so all come to one answer.
        """
        own = schedule.compute == "gated" or schedule.transport == "sm"
        if schedule.transport == "collective" or not own:
            return True
        if self.reason:
            return False
        return self.compiles or _in_pack(problem, schedule, self.gpus)


@lru_cache(maxsize=1024)
def _in_pack(
    problem: Problem, schedule: Schedule, gpus: tuple[tuple[int, int], ...]
) -> bool:  # fmt: skip
    for capability, processors in gpus:
        kernels = DescribedKernels(capability, processors)
        for rank in range(problem.world):
            if missing(lower_rank(problem, schedule, rank), kernels):
                return False
    return True
