"""matmul_all_to_all: x_r in row blocks; rank r gets concat over s of (block r of x_s) . w_s.

The last GEMM of an expert, and the combine of a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ficco.operators import blocks, exchanges
from ficco.operators.functions import product_flops, transposed_splits
from ficco.operators.registry import Flow, Kept, Operator


def _gradient(call: Any, kept: Kept, dys: Sequence[Any]) -> list[Any]:
    """Both gradients need the returned dy; if both are wanted, one collective returns it."""
    x, w = kept.tensors
    splits, *rest = kept.rest
    dy, back = call.matrix(dys[0]), transposed_splits(splits)
    returned = kept.arrivals.of(dys[0])
    if returned is None and not (kept.needs[1] or kept.arrivals.wanted):
        return [call.mirror("all_to_all_matmul", (dy, w.t(), back, *rest)), None]
    if returned is None:
        returned = call.run("exchange_rows", (dy, back, rest[0]))
        kept.arrivals.keep(dys[0], returned)
    return [
        returned @ w.t() if kept.needs[0] else None,
        (returned.t() @ x).t() if kept.needs[1] else None,
    ]


OPERATOR = Operator(
    name="matmul_all_to_all",
    label="mm+A2A",
    about="multiply, and send every rank its rows of the product",
    flow=Flow("scatter", "products", "move", "all_to_all", splits=True),
    schedules=("push_sm", "whole_sm"),
    check=exchanges.check,
    fields=exchanges.fields,
    result_shapes=exchanges.result_shapes,
    operands=exchanges.operands,
    meaning=exchanges.expected,
    blocks=blocks.exchanged,
    reference=exchanges.reference,
    pose=exchanges.pose,
    function=exchanges.function("matmul_all_to_all", product_flops, _gradient),
)
