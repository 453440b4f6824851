"""all_to_all_matmul: x_r in row blocks; rank r gets concat over s of block r of x_s, . w_r.

The dispatch of a mixture of experts, and the first GEMM of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ficco.operators import blocks, exchanges
from ficco.operators.functions import transposed_splits
from ficco.operators.registry import Flow, Kept, Operator


def _flops(x: Any, w: Any, *rest: Any, out_shape: Any, **more: Any) -> int:
    """Return the operations of the product of the rows that arrive."""
    return 2 * math.prod(out_shape) * w[0]  # type: ignore[no-any-return]


def _gradient(call: Any, kept: Kept, dys: Sequence[Any]) -> list[Any]:
    """No operator sums over arriving rows, so dw exchanges x once more.

    If dx is needed first, x is exchanged then: dw alone sends nothing, as in PyTorch.
    """
    x, w = kept.tensors
    splits, *rest = kept.rest
    dy = call.matrix(dys[0])
    gradients: list[Any] = [None] * 2
    if kept.needs[0]:
        args = (dy, w.t(), transposed_splits(splits), *rest)
        gradients[0] = call.mirror("matmul_all_to_all", args)
    if kept.needs[1] or kept.arrivals.wanted:
        arrived = kept.arrivals.of(None)
        if arrived is None:
            arrived = call.run("exchange_rows", (x, splits, rest[0]))
        if kept.needs[1]:
            gradients[1] = (dy.t() @ arrived).t()
        else:
            kept.arrivals.keep(None, arrived)
    return gradients


OPERATOR = Operator(
    name="all_to_all_matmul",
    label="A2A+mm",
    about="send every rank its rows of x, and multiply what arrives with the weight of the rank",
    flow=Flow("gather", "products", "multiply", "all_to_all", splits=True),
    schedules=("push_sm", "whole_sm"),
    check=exchanges.check,
    fields=exchanges.fields,
    result_shapes=exchanges.result_shapes,
    operands=exchanges.operands,
    meaning=exchanges.expected,
    blocks=blocks.exchanged,
    reference=exchanges.reference,
    pose=exchanges.pose,
    function=exchanges.function("all_to_all_matmul", _flops, _gradient),
)
