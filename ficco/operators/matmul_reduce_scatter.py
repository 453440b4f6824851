"""matmul_reduce_scatter: from x_r [m, k_r] and w_r [k_r, n], its rows of the sum of x_s . w_s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ficco.operators import blocks, reductions
from ficco.operators.arrays import Library
from ficco.problem import Problem
from ficco.registry import Array, Expected, Flow, Operator, Posed

__all__ = ["OPERATOR"]


def _result_shapes(problem: Problem, rank: int) -> list[tuple[int, int]]:
    return [(problem.rows[rank], problem.n)]


def _meaning(problem: Problem, rank: int) -> Iterator[Expected]:
    return reductions.expected_rows(problem, rank, owner=rank, at=0)


def _pose(
    library: Library,
    xs: Sequence[Array | Sequence[Array]],
    ws: Sequence[Array | Sequence[Array]],
    rows: Sequence[int] | None = None,
    bias: Sequence[Any] | None = None,
) -> Posed:
    return reductions.pose(OPERATOR.name, library, xs, ws, rows, bias)


OPERATOR = Operator(
    name="matmul_reduce_scatter",
    label="mm+RS",
    flow=Flow("scatter", "products", "sum", "reduce_scatter"),
    schedules=("ring_1d", "gated_sums_1d"),
    check=reductions.check,
    fields=reductions.fields,
    result_shapes=_result_shapes,
    operands=reductions.operands,
    meaning=_meaning,
    blocks=blocks.scattered,
    inputs=reductions.inputs,
    reference=reductions.reference,
    pose=_pose,
)
