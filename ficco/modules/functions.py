"""The operators as differentiable functions of this rank's torch tensors, one process per rank.

    y = ficco.all_gather_matmul(x, linear.weight.t(), group=tp)

Every function is a collective call: all ranks of the group make it, with equal operator, rows, k or
n, dtype, splits and schedule. Tensors are either on the CPU, where a call has finished when it
returns, or all on this rank's GPU, where it is enqueued on the current stream. Inputs are 2-D or
3-D (the first dimension is split over ranks) and may have any strides.

Gradients are overlapped too, with the schedule and grain of the call, if an operator fits. A
backward is as collective as its forward: inputs need a gradient on all ranks or on none, and all
ranks run the same backward. The loss is the sum of what the ranks compute from their own outputs;
if outputs are equal on all ranks, it is what every rank computes. Second gradients are not
supported. torch.compile, make_fx, activation checkpointing, autocast (inputs are cast, as for
torch.mm) and capture of forward and backward into CUDA graphs work; transforms of torch.func and
DTensors are refused.

`schedule="auto"` uses the schedule that is predicted to be fastest on the group's devices. It is
`serial` if none is faster, or if the devices have no profile (`FICCO_LOG=info` logs the choice and
its reason). Ranks choose without messages: each assumes that the others have the same number of
columns (or the same part of k). If they differ, name a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import is_initialized

from ficco import registry
from ficco.checking import whole_number, whole_numbers
from ficco.errors import InputError, shown
from ficco.modules import autograd, bags, groups, operators, torch_library
from ficco.modules.auto import AUTO
from ficco.modules.call_cache import find, key_of
from ficco.modules.calling import check_schedule
from ficco.modules.groups import collective
from ficco.modules.routes import DIRECT, RECORDED, autocast, custom, is_custom, perform, survey
from ficco.private.torch_core import DisableAutocast
from ficco.problem import MOST
from ficco.schedule import Schedule

__all__ = [
    "all_gather_matmul",
    "all_to_all_matmul",
    "column_matmul",
    "embedding_all_to_all",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
]

DEFAULT = AUTO
OPERATORS = torch_library.NAMES  # the custom operators; this import registers them
Tensor = torch.Tensor
_ONE_PLAIN = ((False,), None, None, False)  # one weight: no bias, axes or rows; nothing is kept
_LEAF = torch.zeros(1, 1, requires_grad=True)


@collective
def all_gather_matmul(  # noqa: PLR0913 - a call has this many options
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    *,
    group: Any = None,
    rows: Sequence[int] | None = None,
    bias: Any = None,
    axes: Sequence[str] | None = None,
    schedule: str | Schedule = DEFAULT,
    grain: int | None = None,
    save_gathered: bool = True,
) -> Any:
    """Multiply the concatenation of all ranks' rows with this rank's weight.

    Backward is one matmul_reduce_scatter for x; the weights' gradients are GEMMs with the gathered
    x, which waits for them.

    Args:
        x: [m_r, k], or [s_r, b, k].
        w: [k, n_r] with any strides (pass linear.weight.t()), or several that share the gather.
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.
        rows: first sizes of x by rank, the same list on all ranks; None: all equal this rank's.
        bias: [n_r], or one (or None) per weight.
        axes: per weight: "rows", or "contraction" for concat(x)^T . w with w [m, n_r].
        schedule: a schedule or its name; "auto": see ficco.modules.functions.
        grain: chunks per shard, instead of the schedule's.
        save_gathered: keep the gathered x, p times as large as x, until backward, as plain PyTorch
            does; copy engines copy it out of the window during the GEMMs. False: keep only x, and
            gather it again in backward. Nothing is kept if no weight records a gradient.

    Returns:
        [m, n_r] (or [s, b, n_r]; along the contraction [k, n_r]); a tuple for several weights.

    Raises:
        InputError: tensors do not fit; ScheduleError: no plan implements the schedule;
        TimeoutExceeded, EngineError: the call failed on some rank, and the group needs `reset`.
    """
    if rows is None and bias is None and axes is None:
        y = _repeated("all_gather_matmul", x, w, (), group, schedule, _ONE_PLAIN, grain)
        if y is not None:
            return y
    weights, biases, biased = _listed(w, bias)
    axes, rows = _copied_list(axes), _sizes("rows", rows)
    way = survey((x, *weights, *biases))
    keep_gathered = (
        way != DIRECT
        and save_gathered
        and torch.is_grad_enabled()
        and any(map(_requires_grad, weights))
    )
    rest = (biased, axes, rows, keep_gathered, group, schedule, grain)
    outputs = _call("all_gather_matmul", (x, weights, biases, *rest), way)
    return outputs[0] if isinstance(w, Tensor) else tuple(outputs[: len(weights)])


def column_matmul(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    *,
    group: Any = None,
    bias: Any = None,
    schedule: str | Schedule = DEFAULT,
    grain: int | None = None,
) -> Any:
    """Multiply rows that are the same on all ranks with this rank's columns of a weight.

    Forward sends nothing. Backward sums the gradient of x over ranks by one matmul_all_reduce for
    all weights, so the gradient is equal on all ranks too. Without torch.distributed this rank is
    the only one.

    Args:
        x: [m, k], or [s, b, k], equal on all ranks.
        w: [k, n_r] with any strides (pass linear.weight.t()), or several that share x.
        group: as for `all_gather_matmul`.
        bias: [n_r], or one (or None) per weight.
        schedule: for backward: a schedule or its name; "auto": see ficco.modules.functions.
        grain: chunks per shard, instead of the schedule's.

    Returns:
        [m, n_r], or [s, b, n_r]; a tuple for several weights.

    Raises: as `all_gather_matmul`.
    """
    weights, biases, biased = _listed(w, bias)
    if not torch.compiler.is_dynamo_compiling():
        check_schedule(schedule, grain)  # used by backward only
        if group is not None or is_initialized():
            group = groups.process_group(group)  # backward refers to it, even once destroyed
    args = (x, weights, biases, biased, group, schedule, grain)
    outputs = _call("column_matmul", args, survey((x, *weights, *biases)))
    return outputs[0] if isinstance(w, Tensor) else tuple(outputs)


@collective
def matmul_reduce_scatter(
    x: Tensor | Sequence[Tensor],
    w: Tensor | Sequence[Tensor],
    *,
    group: Any = None,
    rows: Sequence[int] | None = None,
    bias: Tensor | None = None,
    schedule: str | Schedule = DEFAULT,
    grain: int | None = None,
) -> Tensor:
    """Sum all ranks' products, and return this rank's rows of the sum.

    Args:
        x: [m, k_r], or [s, b, k_r]; or several, whose products are added up.
        w: [k_r, n] with any strides; one per x.
        group: as for `all_gather_matmul`.
        rows: first sizes of the result by rank; None: all are equal.
        bias: [n], added to this rank's rows; its gradient is the sum over this rank's rows only.
        schedule: a schedule or its name; "auto": see ficco.modules.functions.
        grain: chunks per shard, instead of the schedule's.

    Returns:
        [m_r, n], or [s_r, b, n].

    Raises: as `all_gather_matmul`.
    """
    if rows is None and bias is None:
        y = _repeated("matmul_reduce_scatter", x, w, (None,), group, schedule, (None,), grain)
        if y is not None:
            return y
    xs, ws = _pairs(x, w)
    args = (xs, ws, bias, _sizes("rows", rows), group, schedule, grain)
    way = survey((*xs, *ws, bias))
    return _call("matmul_reduce_scatter", args, way)  # type: ignore[no-any-return]


@collective
def matmul_all_reduce(
    x: Tensor | Sequence[Tensor],
    w: Tensor | Sequence[Tensor],
    *,
    group: Any = None,
    bias: Tensor | None = None,
    schedule: str | Schedule = DEFAULT,
    grain: int | None = None,
) -> Tensor:
    """Sum all ranks' products, and return the whole sum, bitwise equal on all ranks.

    Arguments and errors are those of `matmul_reduce_scatter`; `bias` is the same on all ranks.

    Returns:
        [m, n], or [s, b, n].
    """
    if bias is None:
        y = _repeated("matmul_all_reduce", x, w, (None,), group, schedule, (), grain)
        if y is not None:
            return y
    xs, ws = _pairs(x, w)
    args = (xs, ws, bias, group, schedule, grain)
    return _call("matmul_all_reduce", args, survey((*xs, *ws, bias)))  # type: ignore[no-any-return]


@collective
def all_to_all_matmul(
    x: Tensor,
    w: Tensor,
    splits: Sequence[Sequence[int]],
    *,
    group: Any = None,
    schedule: str | Schedule = DEFAULT,
    grain: int | None = None,
) -> Tensor:
    """Send every rank its block of rows, and multiply the received rows with this rank's weight.

    Args:
        x: [sum of splits[rank], k]: the blocks for rank 0, 1, ... in this order.
        w: [k, n] with any strides.
        splits: splits[s][r] is the number of rows from rank s to rank r; equal on all ranks.
        group: as for `all_gather_matmul`.
        schedule: a schedule or its name; "auto": see ficco.modules.functions.
        grain: chunks per block, instead of the schedule's.

    Returns:
        [rows received, n], ordered by source rank.

    Raises: as `all_gather_matmul`.
    """
    return _exchange("all_to_all_matmul", x, w, splits, group, schedule, grain)


@collective
def matmul_all_to_all(
    x: Tensor,
    w: Tensor,
    splits: Sequence[Sequence[int]],
    *,
    group: Any = None,
    schedule: str | Schedule = DEFAULT,
    grain: int | None = None,
) -> Tensor:
    """Multiply this rank's rows with its weight, and send every rank its block of the product.

    Arguments, result and errors are those of `all_to_all_matmul`.
    """
    return _exchange("matmul_all_to_all", x, w, splits, group, schedule, grain)


def _exchange(
    op: str,
    x: Tensor,
    w: Tensor,
    splits: Sequence[Sequence[int]],
    group: Any,
    schedule: str | Schedule,
    grain: int | None,
) -> Tensor:
    table = _splits(splits)
    y = _repeated(op, x, w, (), group, schedule, (tuple(table),), grain)
    if y is not None:
        return y
    args = (x, w, table, group, schedule, grain)
    return _call(op, args, survey((x, w)))  # type: ignore[no-any-return]


def _splits(splits: Any) -> list[Any]:
    """Return the splits by source and destination, one row behind another.

    Raises:
        InputError: they are not a square of whole numbers.
    """
    try:
        if type(splits) is list and not torch.compiler.is_dynamo_compiling():
            table = [size for row in splits for size in row]
            if {len(row) for row in splits} == {len(splits)} and {*map(type, table)} == {int}:
                return table
        rows = [_sizes(f"splits[{s}]", row) for s, row in enumerate(splits)]
        if {len(row) for row in rows} - {len(rows)}:
            raise TypeError
        return [size for row in rows for size in row]
    except TypeError:
        raise InputError(
            f"splits={shown(splits)}: one list per rank is needed; splits[s][r] is the number of "
            "rows from rank s to rank r"
        ) from None


@collective
def embedding_all_to_all(  # noqa: PLR0913 - a call has this many options
    tables: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    *,
    tables_per_rank: Sequence[int],
    dimension: int,
    batch: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    group: Any = None,
    rows: Sequence[int] | None = None,
    schedule: str | Schedule = DEFAULT,
    grain: int | None = None,
) -> Tensor:
    """Pool this rank's tables for the whole batch, and return its batch slice of all ranks' tables.

    Gradients of tables are dense. If some rank has no table, all ranks take part in backward
    whenever gradients are recorded, even if no table needs a gradient.

    Args:
        tables: this rank's tables, each [rows, dimension]; may be empty.
        indices: per table [lookups], int64.
        offsets: per table [batch], int64: the start of each bag.
        tables_per_rank: number of tables by rank, the same list on all ranks.
        dimension: columns of all tables.
        batch: bags of the whole batch.
        dtype: of all tables; None: that of this rank's tables, float32 if it has none.
        device: of all tables; None: that of this rank's tables. If it has none: the device of the
            open group, else the current GPU if the group supports GPUs (nccl), else the CPU.
        group: as for `all_gather_matmul`.
        rows: size of the batch slice by rank; None: torch.chunk's rule.
        schedule: a schedule or its name; "auto": see ficco.modules.functions.
        grain: chunks per batch slice, instead of the schedule's.

    Returns:
        [rows of its slice, dimension x all tables].

    Raises: as `all_gather_matmul`.
    """
    dimension, batch = _size("dimension", dimension), _size("batch", batch)
    if tables_per_rank is None:
        raise InputError("tables_per_rank=None: a list of the number of tables by rank is needed")
    tables_per_rank = _sizes("tables_per_rank", tables_per_rank)
    tables, indices = bags.listed(tables, "tables"), bags.listed(indices, "indices")
    offsets = bags.listed(offsets, "offsets")
    like = bags.empty_like_tables(tables, dimension, dtype, device, group)
    if 0 in tables_per_rank and torch.is_grad_enabled() and not any(map(_requires_grad, tables)):
        like = _with_gradient(like)
    tensors = (*tables, *indices, *offsets, like)
    args = (
        tables, indices, offsets, like, tables_per_rank, batch, _sizes("rows", rows), group,
        schedule, grain,
    )  # fmt: skip
    return _call("embedding_all_to_all", args, survey(tensors))  # type: ignore[no-any-return]


def _repeated(
    name: str,
    x: Any,
    w: Any,
    more: tuple[None, ...],
    group: Any,
    schedule: str | Schedule,
    facts: tuple[Any, ...],
    grain: int | None,
) -> Tensor | None:
    """Repeat a call that `operators.run` has cached, of one input and one weight, or return None.

    Args:
        name: of the operator.
        x: the input.
        w: the weight.
        more: the optional tensors of the operator, all absent.
        group: as the user gave it.
        schedule: as the user gave it.
        facts: the operator's further arguments, as `operators.run` orders them.
        grain: as the user gave it.
    """
    if not isinstance(x, Tensor) or not x.is_cuda or not isinstance(w, Tensor):
        return None  # only calls on GPUs are cached
    if type(grain) not in (int, type(None)) or survey((x, w)) != DIRECT:
        return None
    call = find(key_of(name, group, x, (w, *more), schedule, *facts, grain))
    return None if call is None else call.run((x, w))[0]


def _call(name: str, args: tuple[Any, ...], way: int) -> Any:
    """Make a call by the route that its tensors need."""
    if way == DIRECT:
        return operators.run(name, args)
    function = registry.function(name)
    flat, rest = function.flat(args)
    if way == RECORDED:
        return _recorded(function, rest, flat)
    if function.casts:
        flat = autocast(flat)
    nested = function.nested(flat, rest)
    recording = torch.is_grad_enabled() and any(map(_requires_grad, flat))
    if is_custom(flat):
        if not (function.sends or recording) and torch.compiler.is_dynamo_compiling():
            return operators.run(name, nested)  # nothing is sent: let the compiler fuse it
        return custom(name, nested)
    if recording:
        return _recorded(function, rest, flat)
    with DisableAutocast():  # plans set their own dtypes
        return perform(name, nested)


def _recorded(function: registry.Function, rest: tuple[Any, ...], flat: Sequence[Any]) -> Any:
    ys = autograd.Recorded.apply(function, rest, *flat)  # type: ignore[no-untyped-call]
    return ys if function.several else ys[0]


def _sizes(name: str, values: Any) -> Any:
    """Return a copy of sizes as a list, because backward reads it too.

    Raises:
        InputError: they are not a sequence of whole numbers.
    """
    if values is None or torch.compiler.is_dynamo_compiling():
        return _copied_list(values)
    try:
        if True in [type(value) is torch.SymInt for value in values]:  # from a tracer
            return list(values)
    except TypeError:
        pass  # not a sequence: refused below
    return list(whole_numbers(values, name))


def _size(name: str, value: Any) -> Any:
    """Return one size; raise as `_sizes`."""
    if torch.compiler.is_dynamo_compiling() or isinstance(value, torch.SymInt):
        return value
    return whole_number(value, name, 0, MOST)


def _copied_list(values: Sequence[Any] | None) -> list[Any] | None:
    """Return a copy of the values as a list, because backward reads it too."""
    if values is None or torch.compiler.is_dynamo_compiling():
        return None if values is None else list(values)
    try:
        axes = None if isinstance(values, (str, bytes)) else list(values)
    except TypeError:
        axes = None
    if axes is None:
        raise InputError(
            f"axes={shown(values)}: a list with 'rows' or 'contraction' per weight is needed"
        )
    for i, axis in enumerate(axes):
        if not isinstance(axis, str):
            raise InputError(f"axes[{i}]={shown(axis)}: 'rows' or 'contraction' is needed")
    return axes


def _with_gradient(like: Tensor) -> Tensor:
    """Return a row that needs a gradient, so this rank takes part in backward."""
    if torch.compiler.is_dynamo_compiling():  # dynamo does not support new leaves
        return _LEAF.to(like).expand(1, like.shape[1])
    return like.new_zeros((1, like.shape[1])).requires_grad_()


def _requires_grad(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.requires_grad


def _pairs(x: Any, w: Any) -> tuple[list[Any], list[Any]]:
    """Return inputs and weights as lists of equal length."""
    if isinstance(x, Tensor) and isinstance(w, Tensor):
        return [x], [w]
    xs, ws = (list(arg) if isinstance(arg, (tuple, list)) else [arg] for arg in (x, w))
    if len(xs) != len(ws) or not xs:
        raise InputError(f"{len(xs)} inputs, {len(ws)} weights: give pairs of x and w")
    return xs, ws


def _several(w: Any) -> list[Any]:
    """Return weights as a list; entries that are not tensors are refused later."""
    if isinstance(w, (tuple, list)):
        return list(w)
    if isinstance(w, (Tensor, type)) or hasattr(w, "shape") or not hasattr(w, "__iter__"):
        return [w]
    return list(w)


def _listed(w: Any, bias: Any) -> tuple[list[Any], list[Any], list[bool]]:
    """Return the weights, the biases, and per weight whether it has a bias."""
    weights = _several(w)
    if bias is None:
        return weights, [], [False] * len(weights)
    biases = list(bias) if isinstance(bias, (tuple, list)) else [bias] * len(weights)
    return (
        weights,
        [offset for offset in biases if offset is not None],
        [offset is not None for offset in biases],
    )
