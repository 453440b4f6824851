"""matmul_all_reduce: from x_r [m, k_r] and w_r [k_r, n], the sum of x_s . w_s on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ficco.errors import InputError
from ficco.operators import blocks, reductions
from ficco.operators.arrays import Library
from ficco.problem import Problem, offsets
from ficco.registry import Array, Expected, Flow, Operator, Posed

__all__ = ["OPERATOR"]


def _result_shapes(problem: Problem, rank: int) -> list[tuple[int, int]]:
    return [(problem.m, problem.n)]


def _meaning(problem: Problem, rank: int) -> Iterator[Expected]:
    first = offsets(problem.rows)
    for owner in range(problem.world):
        yield from reductions.expected_rows(problem, rank, owner, at=first[owner])


def _pose(
    library: Library,
    xs: Sequence[Array | Sequence[Array]],
    ws: Sequence[Array | Sequence[Array]],
    bias: Sequence[Any] | None = None,
) -> Posed:
    posed = reductions.pose(OPERATOR.name, library, xs, ws, None, bias)
    if posed.problem.outputs[0].bias and library.immediate:
        rows = [arrays["bias0"].tobytes() for arrays in posed.arrays]
        for rank, row in enumerate(rows):
            if row != rows[0]:
                raise InputError(f"bias[{rank}] differs from bias[0]; it is one sum, with one bias")
    return posed


OPERATOR = Operator(
    name="matmul_all_reduce",
    label="mm+AR",
    flow=Flow("scatter", "products", "share", "all_reduce", one_kernel="all_reduce"),
    schedules=("ring_1d", "gated_sums_1d", "one_shot_sm", "two_shot_sm"),
    check=reductions.check,
    fields=reductions.fields,
    result_shapes=_result_shapes,
    operands=reductions.operands,
    meaning=_meaning,
    blocks=blocks.scattered,
    inputs=reductions.inputs,
    alike=("bias0",),
    reference=reductions.reference,
    pose=_pose,
)
