"""The launches of ficco's own kernels in a plan, computed without a GPU and before any call.

Arrays have no memory. Their addresses and, if sizes allow, pitches are multiples of 16, as in
nearly all calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ficco.core.dtypes import ALL
from ficco.engine.compute.own_kernels import OwnKernels
from ficco.kernels.arrays import Address, Described, DescribedArrays
from ficco.kernels.records import Places, Setting
from ficco.kernels.variants import Launch
from ficco.operators.problem_checks import MAX_WORLD
from ficco.plan import RankPlan, Region
from ficco.program import Work
from ficco.program.passes import compile_plan
from ficco.program.target import cuda_target
from ficco.program.tiling import Tile

_ADDRESS = 1 << 40  # a multiple of 16, as are all addresses of allocations
_NOWHERE = Places([[_ADDRESS] * MAX_WORLD] * 2, [[_ADDRESS] * MAX_WORLD] * 2, Address(_ADDRESS))
_WORDS = Address(_ADDRESS)
_BOTH = (True, False)
SETTING = Setting(_NOWHERE, _NOWHERE, 0, 1.0, lambda: _ADDRESS, {}, _ADDRESS)  # of no program


class DescribedKernels(OwnKernels):
    """Computes launches from arrays without memory."""

    def __init__(self, capability: int, processors: int) -> None:
        arrays = DescribedArrays(capability, processors)
        super().__init__(lambda: arrays)


def matrix(rows: int, cols: int, dtype: str, turned: bool = False) -> Described:
    """Return a contiguous matrix in row-major order, or column-major if `turned`."""
    if turned:
        return matrix(cols, rows, dtype).T
    return Described(_ADDRESS, (rows, cols), (cols, 1), dtype)


def launches_in(
    plan: RankPlan, kernels: OwnKernels, ways: Sequence[bool] = _BOTH, tile: Tile | None = None
) -> Iterator[Launch]:
    """Yield all launches of a plan.

    Args:
        plan: the plan of one rank.
        kernels: computes the launches.
        ways: weight layouts; True: weights are column-major.
        tile: tile of gated products; None: the best tile.
    """
    program = compile_plan(plan, cuda_target())
    buffers = {buffer.name: buffer for buffer in program.buffers}
    setting = SETTING._replace(shared={}, buffers=buffers, tile=tile)
    for launch in program.launches:
        if launch.by == "native":
            work = launch.work
            prepared = kernels.prepare(work, setting)
            of_both = [_operands(plan, kernels, work, turned) for turned in ways]
            for operands in of_both if of_both[0] != of_both[-1] else of_both[:1]:
                found = kernels.launch_of(prepared, operands, 0)
                if found is not None:
                    yield found


def _operands(plan: RankPlan, kernels: OwnKernels, work: Work, way: bool) -> dict[str, Any]:
    """Return a work's operands; way: whether weights are column-major."""
    buffers = {buffer.name: buffer for buffer in plan.buffers}

    def handle(region: Region, turned: bool | None = None) -> Described:
        buffer = buffers[region.buffer]
        if turned is not None:
            rows, cols = (region.cols, region.rows) if turned else (region.rows, region.cols)
            return matrix(rows, cols, buffer.dtype, way)
        at = _ADDRESS + (region.row0 * buffer.cols + region.col0) * ALL[buffer.dtype].bytes
        return Described(at, (region.rows, region.cols), (buffer.cols, 1), buffer.dtype)

    matrices = {
        name: Region(plan.rank, name, 0, buffer.rows, 0, buffer.cols)
        for name, buffer in buffers.items()
    }
    found = kernels.record(work).operands(work, handle, matrices)
    return found | {"words": _WORDS}
