"""matmul_reduce_scatter: x_r [m, k_r] and w_r [k_r, n] give each rank rows of sum(x_s . w_s)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ficco.core.errors import InputError
from ficco.operators import blocks, reductions
from ficco.operators.functions import (
    CALL,
    PAIRS,
    as_matrix,
    flat_pairs,
    keep_pairs,
    nested_pairs,
    sum_flops,
)
from ficco.operators.problem import Problem
from ficco.operators.registry import Array, Expected, Flow, Function, Kept, Local, Operator


def _result_shapes(problem: Problem, rank: int) -> list[tuple[int, int]]:
    return [(problem.rows[rank], problem.n)]


def _meaning(problem: Problem, rank: int) -> Iterator[Expected]:
    return reductions.expected_rows(problem, rank, owner=rank, at=0)


# ---- the function of PyTorch: x, w, bias, rows, group, schedule, grain


def _shapes(
    ranks: Callable[[str], tuple[int, int]],
    x: Sequence[Array],
    w: Sequence[Array],
    bias: Any,
    rows: Any,
    group: str,
    *rest: Any,
) -> Array:
    (rank, world), first = ranks(group), x[0]
    high = rows[rank] if rows is not None else first.shape[0] // world
    return first.new_empty((high, *first.shape[1:-1], w[0].shape[1]))


def _local(
    call: Any,
    x: Sequence[Array],
    w: Sequence[Array],
    bias: Array | None,
    rows: Sequence[int] | None,
) -> Local | Array:
    """Return this rank's rows of the sum of the products of all ranks and pairs."""
    high = x[0].shape[0]
    if rows is None and high % call.world:
        raise InputError(
            f"x has {high} rows for {call.world} ranks, which do not divide evenly; pass "
            "rows=, the number of rows of each rank"
        )
    per_rank = rows if rows is not None else (high // call.world,) * call.world
    sizes = call.rows_of(per_rank, total=high)
    given = rows is not None
    return reductions.local(call, x, w, bias, sizes, int(per_rank[call.rank]), given)


def _gradient(call: Any, kept: Kept, dys: Sequence[Any]) -> list[Any]:
    """One gather of dy gives dx = dY w^T and dw^T = dY^T x. The bias is added to own rows."""
    several = len(kept.tensors) // 2
    rows, *rest = kept.rest
    if rows is not None:
        rows = [r * math.prod(kept.shapes[0][1:-1]) for r in rows]
    dy = call.matrix(dys[0])
    gradients: list[Any] = [None] * len(kept.shapes)
    wanted = [i for i in range(2 * several) if kept.needs[i]]
    gathered, later = kept.arrivals.of(dys[0]), kept.arrivals.wanted
    sink = kept.sink if kept.needs[several] else None
    # A sink multiplies the whole dy itself, if something else gathers it.
    adds = sink is not None and (kept.needs[0] or gathered is not None)
    if adds:
        wanted.remove(several)
    operands = [
        kept.tensors[several + i].t() if i < several else as_matrix(kept.tensors[i - several])
        for i in wanted
    ]
    axes = ["rows" if i < several else "contraction" for i in wanted]
    products: list[Any] = []
    if gathered is not None:
        products = call.multiply(gathered, operands, axes)
    elif operands:
        products = call.gather(dy, operands, axes, (rows, *rest), later or adds)
        if later or adds:
            *products, gathered = products
        if later:
            kept.arrivals.keep(dys[0], gathered)
    for i, gradient in zip(wanted, products, strict=True):
        if i < several:
            gradients[i] = gradient.reshape(kept.shapes[i])
        else:
            gradients[i] = gradient.t() if sink is None else sink.add(gradient.t())
    if sink is not None and adds:
        gradients[several] = sink.add_product(as_matrix(kept.tensors[0]), gathered)
    return reductions.bias_gradient(kept, dy, gradients)


OPERATOR = Operator(
    name="matmul_reduce_scatter",
    label="mm+RS",
    about="multiply, add the products of all ranks, and give each rank its rows of the sum",
    flow=Flow("scatter", "products", "sum", "reduce_scatter"),
    schedules=("ring_1d", "gated_sums_1d", "push_sm", "whole_sm"),
    check=reductions.check,
    fields=reductions.fields,
    result_shapes=_result_shapes,
    operands=reductions.operands,
    meaning=_meaning,
    blocks=blocks.scattered,
    reference=reductions.reference,
    pose=reductions.pose,
    function=Function(
        name="matmul_reduce_scatter",
        schema=f"({PAIRS}, SymInt[]? rows, {CALL}) -> Tensor",
        shapes=_shapes,
        flat=flat_pairs,
        nested=nested_pairs,
        local=_local,
        flops=sum_flops,
        keep=keep_pairs,
        gradient=_gradient,
        joins_pairs=True,
    ),
)
