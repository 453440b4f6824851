"""matmul_all_to_all: x_r in row blocks; rank r gets concat over s of (block r of x_s) . w_s.

The last GEMM of an expert, and the combine of a mixture of experts.
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
    name="matmul_all_to_all",
    label="mm+A2A",
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
)
