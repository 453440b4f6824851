"""column_matmul: x [m, k], equal on all ranks, times w_r [k, n_r]. A function without a plan.

Forward has no communication. Backward adds up the gradients of x over ranks: one matmul_all_reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from ficco.operators.functions import (
    CALL,
    WEIGHTS,
    add_bias_gradients,
    as_matrix,
    flat_weights,
    keep_weights,
    nested_weights,
    weight_flops,
)
from ficco.operators.registry import Array, Function, Kept


def _shapes(ranks: Any, x: Array, w: Sequence[Array], *rest: Any) -> list[Array]:
    return [x.new_empty((*x.shape[:-1], weight.shape[1])) for weight in w]


def _gradient(call: Any, kept: Kept, dys: Sequence[Any]) -> list[Any]:
    x, *ws = kept.tensors
    biased, *rest = kept.rest
    dy_matrices = [call.matrix(dy) for dy in dys]
    gradients: list[Any] = [None] * len(kept.shapes)
    if kept.needs[0]:
        pairs = [(dy, w.t()) for dy, w in zip(dy_matrices, ws, strict=True) if dy is not None]
        if call.has_ranks(rest[0]):
            first, second = [a for a, _ in pairs], [b for _, b in pairs]
            dx = call.mirror("matmul_all_reduce", (first, second, None, *rest))
        else:
            dx = reduce(lambda total, y: total + y, (a @ b for a, b in pairs))
        gradients[0] = dx.reshape(kept.shapes[0])
    for i, dy in enumerate(dy_matrices):
        if dy is not None and kept.needs[1 + i]:
            gradients[1 + i] = call.weight_gradient(as_matrix(x), dy, kept.sink)
    add_bias_gradients(kept, dy_matrices, gradients, biased)
    return gradients


FUNCTION = Function(
    name="column_matmul",
    schema=f"(Tensor x, {WEIGHTS}, {CALL}) -> Tensor[]",
    shapes=_shapes,
    flat=flat_weights,
    nested=nested_weights,
    flops=weight_flops,
    keep=keep_weights,
    gradient=_gradient,
    several=True,
    sends=False,
)
