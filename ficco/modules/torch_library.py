"""The operators as custom operators of torch, namespace `ficco`: for compilers, tracers and modes.

Groups are names, schedules are names or JSON text, splits are flat. The formulas of `gradients`
serve them, too. Results of fakes have shapes alone; what does not fit is refused when it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import register_flop_formula

from ficco.modules import groups, operators
from ficco.modules.autograd import FORMULAS, Kept, refuse_second
from ficco.private.torch_core import DisableAutocast, disable_dynamo
from ficco.problem import chunk_sizes

__all__ = ["NAMES"]

Tensor = torch.Tensor


def _world(group: str) -> int:
    return dist.get_world_size(groups.process_group(group))


def _rank(group: str) -> int:
    return dist.get_rank(groups.process_group(group))


def _gather_shapes(  # noqa: PLR0913 - a call has as many facts
    x: Tensor,
    w: Sequence[Tensor],
    bias: Sequence[Tensor],
    biased: Sequence[bool],
    axes: Sequence[str] | None,
    rows: Sequence[int] | None,
    gathered: bool,
    group: str,
    schedule: str,
    grain: int | None,
) -> list[Tensor]:
    first = sum(rows) if rows is not None else x.shape[0] * _world(group)
    kinds = axes if axes is not None else ["rows"] * len(w)
    found = [
        x.new_empty((x.shape[-1], weight.shape[1]))
        if axis == "contraction"
        else x.new_empty((first, *x.shape[1:-1], weight.shape[1]))
        for weight, axis in zip(w, kinds, strict=True)
    ]
    if gathered:
        found.append(x.new_empty((first * math.prod(x.shape[1:-1]), x.shape[-1])))
    return found


def _scatter_shape(
    x: Sequence[Tensor], w: Sequence[Tensor], bias: Any, rows: Any, group: str, *rest: Any
) -> Tensor:
    first = x[0]
    mine = rows[_rank(group)] if rows is not None else first.shape[0] // _world(group)
    return first.new_empty((mine, *first.shape[1:-1], w[0].shape[1]))


def _reduce_shape(x: Sequence[Tensor], w: Sequence[Tensor], *rest: Any) -> Tensor:
    return x[0].new_empty((*x[0].shape[:-1], w[0].shape[1]))


def _column_shapes(x: Tensor, w: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[1])) for weight in w]


def _exchange_shape(x: Tensor, w: Tensor, splits: Sequence[int], group: str, *rest: Any) -> Tensor:
    return x.new_empty((sum(splits[_rank(group) :: _world(group)]), w.shape[1]))


def _rows_shape(x: Tensor, splits: Sequence[int], group: str) -> Tensor:
    return x.new_empty((sum(splits[_rank(group) :: _world(group)]), x.shape[1]))


def _embedding_shape(
    tables: Sequence[Tensor],
    indices: Sequence[Tensor],
    starts: Sequence[Tensor],
    like: Tensor,
    counts: Sequence[int],
    batch: int,
    rows: Sequence[int] | None,
    group: str,
    *rest: Any,
) -> Tensor:
    sizes = rows if rows is not None else chunk_sizes(batch, _world(group))
    return like.new_empty((sizes[_rank(group)], like.shape[1] * sum(counts)))


_CALL = "str group, str schedule, int? grain"
_WEIGHTS = "Tensor[] w, Tensor[] bias, bool[] biased"
_PAIRS = "Tensor[] x, Tensor[] w, Tensor? bias"
_GATHER = f"Tensor x, {_WEIGHTS}, str[]? axes, SymInt[]? rows, bool gathered"
_SCHEMAS: dict[str, tuple[str, Callable[..., Any]]] = {
    "all_gather_matmul": (f"({_GATHER}, {_CALL}) -> Tensor[]", _gather_shapes),
    "matmul_reduce_scatter": (
        f"({_PAIRS}, SymInt[]? rows, {_CALL}) -> Tensor", _scatter_shape
    ),
    "matmul_all_reduce": (f"({_PAIRS}, {_CALL}) -> Tensor", _reduce_shape),
    "column_matmul": (
        f"(Tensor x, {_WEIGHTS}, {_CALL}) -> Tensor[]", _column_shapes
    ),
    "all_to_all_matmul": (
        f"(Tensor x, Tensor w, SymInt[] splits, {_CALL}) -> Tensor", _exchange_shape
    ),
    "matmul_all_to_all": (
        f"(Tensor x, Tensor w, SymInt[] splits, {_CALL}) -> Tensor", _exchange_shape
    ),
    "embedding_all_to_all": (
        "(Tensor[] tables, Tensor[] indices, Tensor[] starts, Tensor like, int[] counts, "
        f"SymInt batch, SymInt[]? rows, {_CALL}) -> Tensor", _embedding_shape
    ),
    "token": ("(Tensor x) -> Tensor", operators.token),
    "exchange_rows": ("(Tensor x, SymInt[] splits, str group) -> Tensor", _rows_shape),
}  # fmt: skip
_LOCAL = ("column_matmul", "token")  # what sends nothing
NAMES = tuple(f"ficco::{name}" for name in _SCHEMAS)


def _gather_flops(x: Any, w: Any, *rest: Any, out_shape: Any, **more: Any) -> int:
    """Every output is as deep as its weight is high."""
    pairs = zip(w, out_shape, strict=False)  # a gathered x may follow the outputs
    return sum(2 * math.prod(y) * weight[0] for weight, y in pairs)


def _sum_flops(x: Any, w: Any, *rest: Any, **more: Any) -> int:
    """Multiply every pair that this rank holds."""
    return sum(_product_flops(*pair) for pair in zip(x, w, strict=True))


def _product_flops(x: Any, w: Any, *rest: Any, **more: Any) -> int:
    """Multiply what this rank holds."""
    return 2 * math.prod(x) * w[1]  # type: ignore[no-any-return]


def _dispatch_flops(x: Any, w: Any, *rest: Any, out_shape: Any, **more: Any) -> int:
    """Multiply what came."""
    return 2 * math.prod(out_shape) * w[0]  # type: ignore[no-any-return]


_FLOPS: dict[str, Callable[..., int]] = {
    "all_gather_matmul": _gather_flops,
    "column_matmul": _gather_flops,
    "matmul_reduce_scatter": _sum_flops,
    "matmul_all_reduce": _sum_flops,
    "matmul_all_to_all": _product_flops,
    "all_to_all_matmul": _dispatch_flops,
}


def _register(name: str, schema: str, shapes: Callable[..., Any]) -> None:
    """Make one operator; not by `custom_op`, whose checks of every call take half as long again."""
    full, run = f"ficco::{name}", getattr(operators, name)
    if name not in _LOCAL:
        run = groups.collective(run)

    # It may be called between the parts of a graph that broke, where what runs is compiled.
    @disable_dynamo  # type: ignore[untyped-decorator]
    def impl(*args: Any) -> Any:
        with DisableAutocast():  # plans mean their own dtypes
            return run(*args)

    torch.library.define(full, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(full, "default", impl)
    torch.library.register_fake(full, shapes)
    if name in _FLOPS:
        register_flop_formula(getattr(torch.ops.ficco, name))(_FLOPS[name])
    if name not in FORMULAS:
        return
    formula = FORMULAS[name]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, rest = formula.flat(inputs)
        needs = [t is not None and t.requires_grad for t in tensors]
        outputs = [output] if isinstance(output, Tensor) else output
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*formula.keep(tensors, rest, needs, outputs))
        ctx.ficco = (rest, needs, [None if t is None else t.shape for t in tensors])

    def backward(ctx: Any, *dys: Any) -> Any:
        refuse_second(name)
        rest, needs, shapes = ctx.ficco
        kept = Kept(ctx.saved_tensors, rest, needs, shapes)
        given = dys[0] if isinstance(dys[0], (list, tuple)) else dys
        with DisableAutocast():  # formulas mean their own dtypes
            found = formula.nested(formula.backward(kept, given), rest)
        return (*found[: -len(rest)], *[None] * len(rest))

    torch.library.register_autograd(full, backward, setup_context=keep)


for _name, (_schema, _shapes) in _SCHEMAS.items():
    _register(_name, _schema, _shapes)
