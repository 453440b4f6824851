"""all_to_all_matmul: x_r in row blocks; rank r gets concat over s of block r of x_s, . w_r.

The dispatch of a mixture of experts, and the first GEMM of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence

from ficco.operators import blocks, exchanges
from ficco.operators.arrays import Library
from ficco.registry import Array, Flow, Operator, Posed

__all__ = ["OPERATOR"]


def _pose(
    library: Library,
    xs: Sequence[Array],
    ws: Sequence[Array],
    splits: Sequence[Sequence[int]],
) -> Posed:
    return exchanges.pose(OPERATOR.name, library, xs, ws, splits)


OPERATOR = Operator(
    name="all_to_all_matmul",
    label="A2A+mm",
    flow=Flow("gather", "products", "multiply", "all_to_all", splits=True),
    check=exchanges.check,
    fields=exchanges.fields,
    result_shapes=exchanges.result_shapes,
    operands=exchanges.operands,
    meaning=exchanges.expected,
    blocks=blocks.exchanged,
    inputs=exchanges.inputs,
    reference=exchanges.reference,
    pose=_pose,
)
