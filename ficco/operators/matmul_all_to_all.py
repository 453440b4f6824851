"""matmul_all_to_all: x_r in row blocks; rank r gets concat over s of (block r of x_s) . w_s.

The last GEMM of an expert, and the combine of a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ficco.operators import blocks, exchanges
from ficco.operators.arrays import Library
from ficco.operators.functions import product_flops, transposed_splits
from ficco.registry import Array, Flow, Kept, Operator, Posed

__all__ = ["OPERATOR"]


def _pose(
    name: str,
    library: Library,
    xs: Sequence[Array],
    ws: Sequence[Array],
    splits: Sequence[Sequence[int]],
) -> Posed | list[list[Array]]:
    return exchanges.pose(name, library, xs, ws, splits)


def _gradient(call: Any, kept: Kept, dys: Sequence[Any]) -> list[Any]:
    """Both gradients need the returned dy; if both are wanted, one collective returns it."""
    x, w = kept.tensors
    splits, *rest = kept.rest
    dy, back = call.matrix(dys[0]), transposed_splits(splits)
    if not kept.needs[1]:
        return [call.mirror("all_to_all_matmul", (dy, w.t(), back, *rest)), None]
    returned = call.run("exchange_rows", (dy, back, rest[0]))
    return [returned @ w.t() if kept.needs[0] else None, (returned.t() @ x).t()]


OPERATOR = Operator(
    name="matmul_all_to_all",
    label="mm+A2A",
    about="multiply, and send every rank its rows of the product",
    flow=Flow("scatter", "products", "move", "all_to_all", splits=True),
    check=exchanges.check,
    fields=exchanges.fields,
    result_shapes=exchanges.result_shapes,
    operands=exchanges.operands,
    meaning=exchanges.expected,
    blocks=blocks.exchanged,
    inputs=exchanges.inputs,
    reference=exchanges.reference,
    pose=_pose,
    function=exchanges.function("matmul_all_to_all", product_flops, _gradient),
)
