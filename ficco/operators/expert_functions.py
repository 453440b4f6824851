"""dispatch_matmul and matmul_combine as functions of PyTorch, and their gradients.

Each is the mirror of the other: the gradient of the rows that one sends is what the other returns.
The gradient of a weight is, for each expert, a product along its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ficco.core.errors import InputError
from ficco.operators.experts import check_shapes
from ficco.operators.functions import CALL, size_for_this_rank, split
from ficco.operators.functions import join as join_flat
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.operators.registry import Array, Function, Kept, Local
from ficco.operators.routing import Routed
from ficco.operators.shapes import sized

# x, routing, w; topk, rows, capacity, gathered; group, schedule, grain
Ranks = Callable[[str], tuple[int, int]]


def is_turned(w: Array) -> bool:
    """Return whether the weights of experts [e, k, n] are stored as [e, n, k]."""
    _, along, across = w.stride()
    return along == 1 and across != 1  # type: ignore[no-any-return]


def stacked(w: Array) -> Array:
    """Return the weights of experts [e, k, n] as they are stored: one contiguous matrix."""
    if w.dim() != 3:
        return w
    whole = (w.transpose(1, 2) if is_turned(w) else w).contiguous()
    return whole.reshape(-1, whole.shape[-1])


def _problem(
    call: Any, x: Array, routing: Array, w: Array, topk: int, rows: Sequence[int], capacity: int
) -> Problem:
    """Check the tensors of this rank, and return the problem."""
    call.check(x, "x", 2)
    call.check(w, "w", 3)
    e, k, n = w.shape
    if not (e and k and n):
        raise InputError(
            f"w {sized(w)}; the weights of experts are [experts, k, n], none of them 0"
        )
    check_shapes("x", x, "w", w, (e, x.shape[1], n))
    sizes = Routed(e, topk, tuple(rows))
    if len(rows) != call.world:
        raise InputError(f"routing is of {len(rows)} ranks, the group has {call.world}")
    call.check_integers(routing, "routing", "int32")
    if routing.numel() != sizes.length(call.rank):
        raise InputError(
            f"routing {sized(routing)}; with {e} experts in w, {topk} slots per token and tokens "
            f"rows={list(rows)} it has {sizes.length(call.rank)} numbers; pass what ficco.route "
            "returned for the same tokens and experts"
        )
    outputs = (Output((n,) * call.world, operand_transposed=is_turned(w)),)
    return Problem(
        call.name, call.world, sizes.rows, k, outputs, call.dtype, experts=e, topk=topk,
        capacities=size_for_this_rank(capacity, call.rank, call.world),
    )  # fmt: skip


def _dispatch_shapes(ranks: Ranks, *arguments: Any) -> list[Array]:
    x, _, w, _, rows, capacity, gathered, *_ = arguments
    kept = [x.new_empty((sum(rows), x.shape[1]))] * bool(gathered)
    return [x.new_empty((capacity, w.shape[2])), *kept]


def _dispatch(
    call: Any, x: Array, routing: Array, w: Array, topk: int, rows: Sequence[int], capacity: int,
    gathered: bool,
) -> Local | list[Array]:  # fmt: skip
    if not sum(rows):
        return [x.new_zeros((capacity, w.shape[2])), *[x.new_zeros(x.shape)] * gathered]
    problem = _problem(call, x, routing, w, topk, rows, capacity)
    if x.shape[0] != rows[call.rank]:
        raise InputError(f"x {sized(x)}, but rank {call.rank} routes {rows[call.rank]} tokens")
    if gathered:
        kept = Output((x.shape[1],) * call.world, "", "gathered")
        problem = _with_output(problem, kept)
    return Local(problem, {"x": call.matrix, "routing": call.row_of(routing), "w": stacked(w)})


def _with_output(problem: Problem, output: Output) -> Problem:
    from dataclasses import replace

    return replace(problem, outputs=(*problem.outputs, output))


def _dispatch_flops(x: Any, routing: Any, w: Any, *rest: Any, out_shape: Any, **more: Any) -> int:
    return 2 * out_shape[0][0] * w[1] * w[2]  # type: ignore[no-any-return]


def _keep_dispatched(tensors: Any, rest: Any, needs: Sequence[bool], ys: Any) -> list[Any]:
    x, routing, w = tensors
    gathered = ys[1] if len(ys) > 1 else x
    return [gathered if needs[2] else None, routing, w]


def _dispatch_gradient(call: Any, kept: Kept, dys: Sequence[Any]) -> list[Any]:
    """dx: the rows of dy times w^T return to their tokens. dw: for each expert x^T dy."""
    x, routing, w = kept.tensors
    topk, rows, _, gathered, *rest = kept.rest
    dy, dx, dw = call.matrix(dys[0]), None, None
    if dy is None:
        return [None, None, None]
    if kept.needs[0]:
        dx = call.mirror("matmul_combine", (dy, routing, w.transpose(1, 2), topk, rows, *rest))
    if kept.needs[2]:
        dw = _weight_gradient(call, w, (x, dy, routing, topk, rows, rest[0]), True, gathered)
    return [dx, None, dw]


def _weight_gradient(
    call: Any, w: Array, facts: tuple[Any, ...], by_tokens: bool, gathered: bool
) -> Array:
    """Return the gradient of w, stored as w is, so that autograd need not copy it."""
    e, k, n = w.shape
    if is_turned(w):
        dw = call.expert_gradient(*facts, (e, n, k), not by_tokens, gathered)
        return dw.transpose(1, 2)
    return call.expert_gradient(*facts, (e, k, n), by_tokens, gathered)


def _combine_shapes(ranks: Ranks, *arguments: Any) -> Array:
    x, _, w, _, rows, group, *_ = arguments
    rank, _ = ranks(group)
    return x.new_empty((rows[rank], w.shape[2]))


def _combine(
    call: Any, x: Array, routing: Array, w: Array, topk: int, rows: Sequence[int]
) -> Local | Array:
    if not sum(rows):
        return x.new_zeros((0, w.shape[2]))
    if not x.shape[0]:
        raise InputError(f"x {sized(x)}: one row or more is needed, also where no expert has any")
    problem = _problem(call, x, routing, w, topk, rows, x.shape[0])
    return Local(problem, {"x": call.matrix, "routing": call.row_of(routing), "w": stacked(w)})


def _combine_flops(x: Any, routing: Any, w: Any, *rest: Any, **more: Any) -> int:
    return 2 * x[0] * w[1] * w[2]  # type: ignore[no-any-return]


def _keep_combined(tensors: Any, rest: Any, needs: Sequence[bool], ys: Any) -> list[Any]:
    x, routing, w = tensors
    return [x if needs[2] else None, routing, w]


def _combine_gradient(call: Any, kept: Kept, dys: Sequence[Any]) -> list[Any]:
    """dx: the rows of dy of all ranks times w^T. dw: for each expert x^T times its rows of dy."""
    x, routing, w = kept.tensors
    topk, rows, *rest = kept.rest
    dy, dw = call.matrix(dys[0]), None
    if dy is None:
        return [None, None, None]
    capacity = kept.shapes[0][0]
    if not kept.needs[0]:  # only dw: nothing is multiplied with w
        facts = dy, x, routing, topk, rows, rest[0]
        return [None, None, _weight_gradient(call, w, facts, False, False)]
    gathered = bool(kept.needs[2])
    dx, *arrived = call.mirror(
        "dispatch_matmul",
        (dy, routing, w.transpose(1, 2), topk, rows, capacity, gathered, *rest),
    )
    if gathered:
        dw = _weight_gradient(call, w, (arrived[0], x, routing, topk, rows, rest[0]), False, True)
    return [dx, None, dw]


def _one(rest: Sequence[Any]) -> int:
    return 1  # the gathered x is only for backward


DISPATCH = Function(
    name="dispatch_matmul",
    schema="(Tensor x, Tensor routing, Tensor w, int topk, SymInt[] rows, SymInt capacity, "
    f"bool gathered, {CALL}) -> Tensor[]",
    shapes=_dispatch_shapes,
    flat=split(3),
    nested=join_flat,
    local=_dispatch,
    flops=_dispatch_flops,
    keep=_keep_dispatched,
    gradient=_dispatch_gradient,
    visible=_one,
    several=True,
)

COMBINE = Function(
    name="matmul_combine",
    schema=f"(Tensor x, Tensor routing, Tensor w, int topk, SymInt[] rows, {CALL}) -> Tensor",
    shapes=_combine_shapes,
    flat=split(3),
    nested=join_flat,
    local=_combine,
    flops=_combine_flops,
    keep=_keep_combined,
    gradient=_combine_gradient,
)


def _gradient_shape(ranks: Ranks, *arguments: Any) -> Array:
    tokens, _, _, _, _, shape, *_ = arguments
    return tokens.new_empty(tuple(shape))


EXPERT_GRADIENT = Function(
    name="expert_gradient",
    schema="(Tensor tokens, Tensor rows, Tensor routing, int topk, SymInt[] counts, SymInt[] shape,"
    " bool by_tokens, bool gathered, str group) -> Tensor",
    shapes=_gradient_shape,
    flat=split(3),
    nested=join_flat,
    group_at=-1,
)
"""Returns for each expert the product, along its rows, of tokens and rows in order of the list.

by_tokens: tokens^T rows, [e, k, n]; else rows^T tokens. gathered: whether tokens are those of all
ranks; else they are gathered. Only gradients call it.
"""
