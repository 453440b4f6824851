"""Checks of problems: every message names the field that is wrong, and the outputs that they check.

`Problem` runs `check` when it is made.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ficco.core.checking import whole_number
from ficco.core.dtypes import DTYPES, INDEX_DTYPES
from ficco.core.errors import InputError, closest, shown
from ficco.operators import registry

if TYPE_CHECKING:
    from ficco.operators.problem import Problem

_RESERVED = re.compile(
    r"x\d*|(y|bias|acc|table|indices|offsets|weights)\d+|gathered|partial|pooled|recv|reduced|returned|routing|sent|shared"
)

MOST = 2**31 - 1  # of m, n and k each
MAX_WORLD = 64  # ranks in one group; it determines the signals' places in a window
AXES = ("rows", "contraction", "gathered")


@dataclass(frozen=True, slots=True)
class Output:
    """One product of a call. All outputs of a gathering operator read the same gather.

    Attributes:
        columns: columns of the product on each rank (n_r for rank r).
        operand: name of the weight buffer that is multiplied; empty for "gathered".
        axis: "rows": [m, k] . w[k, n_r] -> [m, n_r]. "contraction": concat(x)^T . w[m, n_r] ->
            [k, n_r], a sum over all arrivals (a weight gradient). "gathered": concat(x)
            itself, [m, k], for later use.
        operand_transposed: the operand is stored as [n_r, k] (or [n_r, m]).
        bias: a row of n_r values is added to every row.

    Example:
        >>> ficco.Output(columns=(16, 16))  # two ranks with 16 columns each
        Output(columns=(16, 16), operand='w', axis='rows', operand_transposed=False, bias=False)
    """

    columns: tuple[int, ...]
    operand: str = "w"
    axis: str = "rows"
    operand_transposed: bool = False
    bias: bool = False


def checked_world(world: int) -> int:
    """Return a number of ranks."""
    return whole_number(world, "world", 1, MAX_WORLD)


def check(problem: Problem) -> None:
    """Reject an invalid problem; every message names the field."""
    p = problem
    operator = registry.get(p.op)
    checked_world(p.world)
    if not isinstance(p.dtype, str) or p.dtype not in DTYPES:
        raise InputError(
            f"dtype {shown(p.dtype)} is not implemented{closest(p.dtype, DTYPES)}. "
            f"Known: {', '.join(DTYPES)}"
        )
    if p.scales != "none":
        raise InputError(f"scales={shown(p.scales)}: no scaled dtype is implemented; use 'none'")
    check_per_rank("rows", p.rows, p.world)
    if not 1 <= p.m <= MOST:
        raise InputError(
            f"m={shown(p.m)}, the sum of rows={shown(list(p.rows))}: a whole number from 1 to "
            f"{MOST} is needed"
        )
    whole_number(p.k, "k", 1, MOST)
    if not isinstance(p.outputs, (tuple, list)):
        raise InputError(f"outputs={shown(p.outputs)}: a tuple of ficco.Output is needed")
    if not p.outputs:
        raise InputError("outputs: a problem has at least one")
    _check_outputs(p)
    if not p.products:
        raise InputError("outputs: none is a product; name a product, along rows or contraction")
    if not p.n:
        found = shown([list(output.columns) for output in p.products])
        raise InputError(f"outputs: the columns are {found}; n, their sum, must be 1 or more")
    _check_operands(p.products)
    _check_fields(p)
    _check_attachments(p)
    if operator.check is not None:
        operator.check(p)


def _check_fields(p: Problem) -> None:
    """Reject fields that only operators of another flow have."""
    if (p.tables or p.lookups or p.modes) and not p.flow.pools:
        raise InputError(
            f"tables, lookups and modes belong to operators that pool bags, not to {p.op}"
        )
    if not isinstance(p.index_dtype, str) or p.index_dtype not in INDEX_DTYPES:
        raise InputError(
            f"index_dtype={shown(p.index_dtype)}: it is one of {', '.join(INDEX_DTYPES)}"
        )
    if (p.depths or p.pairs) and not p.flow.sums:
        raise InputError(f"depths and pairs belong to operators that add up, not to {p.op}")
    if (p.experts or p.topk or p.capacities) and not p.flow.routes:
        raise InputError(
            f"experts, topk and capacities belong to operators with experts, not to {p.op}"
        )
    if p.splits and not p.flow.splits:
        raise InputError(f"splits belong to operators that exchange rows, not to {p.op}")


def _check_attachments(p: Problem) -> None:
    """Reject operands that follow x where its rows are not the rows of equally wide products."""
    for name, role, follows, dtype in p.operator.attachments:
        if (role, follows) != ("term", "x") or dtype not in ("", *DTYPES):
            raise InputError(
                f"{p.op}: attachment {name} is a {role!r} of {dtype!r} that follows {follows!r}; "
                "what works is a 'term' that follows 'x', in a dtype of problems"
            )
        axes = {output.axis for output in p.products}
        widths = {columns for output in p.products for columns in output.columns}
        if p.pairs or p.flow.pools or axes != {"rows"} or len(widths) > 1:
            raise InputError(
                f"{p.op}: {name} is added to the products of its rows: they need one pair of x and "
                "w, along rows, and the same columns on every rank"
            )


def _check_outputs(p: Problem) -> None:
    for index, output in enumerate(p.outputs):
        if not isinstance(output, Output):
            raise InputError(f"outputs[{index}]={shown(output)}: a ficco.Output is needed")
        check_per_rank(f"outputs[{index}].columns", output.columns, p.world)
        if max(output.columns) > MOST:
            raise InputError(
                f"outputs[{index}].columns={shown(list(output.columns))}: a rank has at most {MOST}"
            )
        if output.axis not in AXES:
            raise InputError(
                f"outputs[{index}].axis={shown(output.axis)}{closest(output.axis, AXES)}: it "
                f"is one of {', '.join(AXES)}"
            )
        if output.axis == "gathered":
            _check_kept(p, index, output)
            continue
        if not output.operand.isidentifier() or _RESERVED.fullmatch(output.operand):
            raise InputError(
                f"outputs[{index}].operand={shown(output.operand)} is not a name, or plans use it; "
                "call it w, w0, w1, ..."
            )


def _check_kept(p: Problem, index: int, output: Output) -> None:
    plain = Output((p.k,) * p.world, "", "gathered")
    if output != plain:
        raise InputError(
            f"outputs[{index}] is the gathered x itself: columns={shown([p.k] * p.world)}, no "
            f"operand, nothing transposed, no bias; {output} found"
        )


def _check_operands(outputs: tuple[Output, ...]) -> None:
    """Check that outputs with the same operand use it with one shape."""
    first: dict[str, Output] = {}
    for index, output in enumerate(outputs):
        other = first.setdefault(output.operand, output)
        if (output.columns, output.axis, output.operand_transposed) != (
            other.columns, other.axis, other.operand_transposed,
        ):  # fmt: skip
            raise InputError(
                f"outputs[{index}] and an earlier one name operand {output.operand!r} with "
                "different shapes; give each operand its own name"
            )


def check_per_rank(name: str, sizes: Sequence[int], count: int, what: str = "world") -> None:
    """Check that `sizes` is a tuple of `count` sizes of 0 or more; messages use `name`."""
    if not isinstance(sizes, (tuple, list)):
        raise InputError(f"{name}={shown(sizes)}: a tuple of sizes is needed, {count} of them")
    if len(sizes) != count:
        raise InputError(
            f"{name}={shown(list(sizes))}: {len(sizes)} entries found, {what} is {count}"
        )
    if not all(type(size) is int and size >= 0 for size in sizes):
        for at, size in enumerate(sizes):
            whole_number(size, f"{name}[{at}]", 0)
