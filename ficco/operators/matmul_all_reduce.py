"""matmul_all_reduce: x_r [m, k_r] and w_r [k_r, n] give the sum of x_s . w_s on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ficco.core.errors import InputError
from ficco.operators import blocks, reductions
from ficco.operators.arrays import Library
from ficco.operators.functions import (
    CALL,
    PAIRS,
    as_matrix,
    flat_pairs,
    keep_pairs,
    nested_pairs,
    sum_flops,
)
from ficco.operators.problem import Problem, chunk_sizes, offsets
from ficco.operators.registry import Array, Expected, Flow, Function, Kept, Local, Operator, Posed


def _result_shapes(problem: Problem, rank: int) -> list[tuple[int, int]]:
    return [(problem.m, problem.n)]


def _meaning(problem: Problem, rank: int) -> Iterator[Expected]:
    first = offsets(problem.rows)
    for owner in range(problem.world):
        yield from reductions.expected_rows(problem, rank, owner, at=first[owner])


def _pose(
    name: str,
    library: Library,
    xs: Sequence[Array | Sequence[Array]],
    ws: Sequence[Array | Sequence[Array]],
    bias: Sequence[Any] | None = None,
) -> Posed | list[list[Array]]:
    posed = reductions.pose(name, library, xs, ws, bias=bias)
    if not isinstance(posed, Posed):
        return posed
    if posed.problem.outputs[0].bias and library.immediate:
        rows = [arrays["bias0"].tobytes() for arrays in posed.arrays]
        for rank, row in enumerate(rows):
            if row != rows[0]:
                raise InputError(f"bias[{rank}] differs from bias[0]; all ranks need the same bias")
    return posed


# ---- the function of PyTorch: x, w, bias, group, schedule, grain


def _shapes(ranks: Any, x: Sequence[Array], w: Sequence[Array], *rest: Any) -> Array:
    return x[0].new_empty((*x[0].shape[:-1], w[0].shape[1]))


def _local(call: Any, x: Sequence[Array], w: Sequence[Array], bias: Array | None) -> Local | Array:
    """Return the sum of the products of all ranks and pairs."""
    sizes = chunk_sizes(call.matrix.shape[0], call.world)
    return reductions.local(call, x, w, bias, sizes, call.first)


def _gradient(call: Any, kept: Kept, dys: Sequence[Any]) -> list[Any]:
    """Gradients need no communication: dy is equal on all ranks."""
    several = len(kept.tensors) // 2
    dy = call.matrix(dys[0])
    gradients: list[Any] = [None] * len(kept.shapes)
    for i in range(several):
        x, w = kept.tensors[i], kept.tensors[several + i]
        if kept.needs[i]:
            gradients[i] = (dy @ w.t()).reshape(kept.shapes[i])
        if kept.needs[several + i]:
            gradients[several + i] = call.weight_gradient(as_matrix(x), dy, kept.sink)
    return reductions.bias_gradient(kept, dy, gradients)


OPERATOR = Operator(
    name="matmul_all_reduce",
    label="mm+AR",
    about="multiply, add the products of all ranks, and give every rank the whole sum",
    flow=Flow("scatter", "products", "share", "all_reduce", one_kernel="all_reduce"),
    schedules=(
        "ring_1d",
        "gated_sums_1d",
        "one_shot_sm",
        "two_shot_sm",
        "one_shot_pull",
        "two_shot_pull",
        "push_sm",
    ),
    check=reductions.check,
    fields=reductions.fields,
    result_shapes=_result_shapes,
    operands=reductions.operands,
    meaning=_meaning,
    blocks=blocks.scattered,
    alike=("bias",),
    reference=reductions.reference,
    pose=_pose,
    function=Function(
        name="matmul_all_reduce",
        schema=f"({PAIRS}, {CALL}) -> Tensor",
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
