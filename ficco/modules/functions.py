"""The operators as differentiable functions of this rank's torch tensors, one process per rank.

    y = ficco.all_gather_matmul(x, linear.weight.t(), group=tp)

Every function is a collective call: all ranks of the group make it, with what they must agree on
(operator, rows, k or n, dtype, splits, schedule) equal. Tensors are on the CPU, where a call ends
before it returns, or all on this rank's GPU, where it is enqueued on the current stream. Inputs may
be 2-D or 3-D (the first dimension is split over ranks) and have any strides.

Gradients are overlapped, too, with the schedule and grain of the call, wherever an operator fits. A
backward is as collective as its forward: inputs need a gradient on all ranks or on none, and all
ranks run backward alike. The loss is the sum of what ranks compute from outputs of their own;
where outputs are equal on all ranks, it is what every rank computes. There are no second gradients.
torch.compile, make_fx, activation checkpointing, autocast (inputs are cast, as torch.mm's are) and
capture of forward and backward into CUDA graphs work; transforms of torch.func and DTensors are
refused.

`schedule="auto"` takes what is predicted to be fastest on the group's devices; `serial` where
nothing is, or where no profile of them is known (`FICCO_LOG=info` says which and why). Ranks choose
without a message: each takes the others to hold as many columns (as deep a part of k) as itself.
Where they do not, name a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import is_initialized

from ficco import registry
from ficco.checking import whole_number, whole_numbers
from ficco.errors import InputError
from ficco.modules import autograd, bags, groups, operators, torch_library
from ficco.modules.auto import AUTO
from ficco.modules.calling import check_asked
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
OPERATORS = torch_library.NAMES  # as custom operators; naming them here registers them
Tensor = torch.Tensor
_LEAF = torch.zeros(1, 1, requires_grad=True)


@collective
def all_gather_matmul(  # noqa: PLR0913 - a call has as many facts
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
        rows: first sizes of x on all ranks, equal on all; None: all hold as many as this one.
        bias: [n_r], or one (or None) per weight.
        axes: per weight: "rows", or "contraction" for concat(x)^T . w with w [m, n_r].
        schedule: a schedule or its name; "auto": see ficco.modules.functions.
        grain: chunks per shard, instead of the schedule's.
        save_gathered: keep the gathered x, p times as large as x, until backward, as plain PyTorch
            does; copy engines take it out of the window beside the GEMMs. False: keep x alone, and
            gather it once more in backward. Without a weight that records a gradient nothing is
            kept.

    Returns:
        [m, n_r] (or [s, b, n_r]; along the contraction [k, n_r]); a tuple for several weights.

    Raises:
        InputError: tensors that do not fit; ScheduleError: a schedule that nothing implements;
        TimeoutExceeded, EngineError: the call failed on some rank, and the group needs `reset`.
    """
    weights, biases, biased = _listed(w, bias)
    axes, rows = _held(axes), _sizes("rows", rows)
    way = survey((x, *weights, *biases))
    kept = way != DIRECT and save_gathered and torch.is_grad_enabled() and any(map(_needs, weights))
    rest = (biased, axes, rows, kept, group, schedule, grain)
    found = _call("all_gather_matmul", (x, weights, biases, *rest), way)
    return found[0] if isinstance(w, Tensor) else tuple(found[: len(weights)])


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

    Forward sends nothing. Backward sums the gradient of x over ranks: one matmul_all_reduce for all
    weights, so that it is the same on all ranks again. Without torch.distributed this rank is taken
    to be the only one.

    Args:
        x: [m, k], or [s, b, k], equal on all ranks.
        w: [k, n_r] with any strides (pass linear.weight.t()), or several that share x.
        group: as for `all_gather_matmul`.
        bias: [n_r], or one (or None) per weight.
        schedule: of the backward: a schedule or its name; "auto": see ficco.modules.functions.
        grain: chunks per shard, instead of the schedule's.

    Returns:
        [m, n_r], or [s, b, n_r]; a tuple for several weights.

    Raises: as `all_gather_matmul`.
    """
    weights, biases, biased = _listed(w, bias)
    if not torch.compiler.is_dynamo_compiling():
        check_asked(schedule, grain)  # which are those of backward
        if group is not None or is_initialized():
            group = groups.process_group(group)  # backward means it, too, when it is there no more
    args = (x, weights, biases, biased, group, schedule, grain)
    found = _call("column_matmul", args, survey((x, *weights, *biases)))
    return found[0] if isinstance(w, Tensor) else tuple(found)


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
        w: [k_r, n] with any strides; as many as x.
        group: as for `all_gather_matmul`.
        rows: first sizes of the result on all ranks; None: all get the same.
        bias: [n], added to this rank's rows; so is its gradient the sum over those alone.
        schedule: a schedule or its name; "auto": see ficco.modules.functions.
        grain: chunks per shard, instead of the schedule's.

    Returns:
        [m_r, n], or [s_r, b, n].

    Raises: as `all_gather_matmul`.
    """
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
    """Send every rank its block of rows, and multiply what this rank got with its weight.

    Args:
        x: [sum of splits[rank], k]: blocks for rank 0, 1, ... below one another.
        w: [k, n] with any strides.
        splits: splits[s][r] rows go from rank s to rank r; equal on all ranks.
        group: as for `all_gather_matmul`.
        schedule: a schedule or its name; "auto": see ficco.modules.functions.
        grain: chunks per block, instead of the schedule's.

    Returns:
        [rows received, n], by the rank they came from.

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
    try:
        rows = [_sizes(f"splits[{s}]", row) for s, row in enumerate(splits)]
        if {len(row) for row in rows} - {len(rows)}:
            raise TypeError
        table = [size for row in rows for size in row]
    except TypeError:
        raise InputError(
            f"splits={splits!r:.80}: a list for each rank is needed, in which splits[s][r] rows go "
            "from rank s to rank r"
        ) from None
    args = (x, w, table, group, schedule, grain)
    return _call(op, args, survey((x, w)))  # type: ignore[no-any-return]


@collective
def embedding_all_to_all(  # noqa: PLR0913 - as many facts as the ranks must share
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

    Gradients of tables are dense. Where some rank has no table, all ranks take part in backward
    whenever gradients are recorded, whether or not any table needs one.

    Args:
        tables: this rank's, each [rows, dimension]; may be none.
        indices: per table [lookups], int64.
        offsets: per table [batch], int64: where each bag begins.
        tables_per_rank: how many each rank has, equal on all.
        dimension: columns of all tables.
        batch: bags of the whole batch.
        dtype: of all tables; None: as this rank's tables are, float32 where it has none.
        device: of all tables; None: as this rank's tables are. Where it has none: what the group is
            open for, else the current GPU if the group serves GPUs (nccl), else the CPU.
        group: as for `all_gather_matmul`.
        rows: batch slice of every rank; None: torch.chunk's rule.
        schedule: a schedule or its name; "auto": see ficco.modules.functions.
        grain: chunks per batch slice, instead of the schedule's.

    Returns:
        [its rows, dimension x all tables].

    Raises: as `all_gather_matmul`.
    """
    dimension, batch = _size("dimension", dimension), _size("batch", batch)
    if tables_per_rank is None:
        raise InputError("tables_per_rank=None: a list is needed, how many tables each rank has")
    tables_per_rank = _sizes("tables_per_rank", tables_per_rank)
    tables, indices = bags.listed(tables, "tables"), bags.listed(indices, "indices")
    offsets = bags.listed(offsets, "offsets")
    like = bags.like(tables, dimension, dtype, device, group)
    if 0 in tables_per_rank and torch.is_grad_enabled() and not any(map(_needs, tables)):
        like = _needing(like)
    tensors = (*tables, *indices, *offsets, like)
    args = (
        tables, indices, offsets, like, tables_per_rank, batch, _sizes("rows", rows), group,
        schedule, grain,
    )  # fmt: skip
    return _call("embedding_all_to_all", args, survey(tensors))  # type: ignore[no-any-return]


def _call(name: str, args: tuple[Any, ...], way: int) -> Any:
    """Make a call on the way that its tensors ask for."""
    if way == DIRECT:
        return operators.run(name, args)
    function = registry.function(name)
    flat, rest = function.flat(args)
    if way == RECORDED:
        return _recorded(function, rest, flat)
    if function.casts:
        flat = autocast(flat)
    given = function.nested(flat, rest)
    recording = torch.is_grad_enabled() and any(map(_needs, flat))
    if is_custom(flat):
        if not (function.sends or recording) and torch.compiler.is_dynamo_compiling():
            return operators.run(name, given)  # nothing is sent: let the compiler fuse it
        return custom(name, given)
    if recording:
        return _recorded(function, rest, flat)
    with DisableAutocast():  # plans mean their own dtypes
        return perform(name, given)


def _recorded(function: registry.Function, rest: tuple[Any, ...], flat: Sequence[Any]) -> Any:
    ys = autograd.Recorded.apply(function, rest, *flat)  # type: ignore[no-untyped-call]
    return ys if function.several else ys[0]


def _sizes(name: str, values: Any) -> Any:
    """Return sizes as a list of this call's own: backward reads it, too.

    Raises:
        InputError: they are no sequence of whole numbers.
    """
    if values is None or torch.compiler.is_dynamo_compiling():
        return _held(values)
    try:
        if True in [type(each) is torch.SymInt for each in values]:  # of a tracer
            return list(values)
    except TypeError:
        pass  # no sequence, which is refused below
    return list(whole_numbers(values, name))


def _size(name: str, value: Any) -> Any:
    """Return one size; raises as `_sizes`."""
    if torch.compiler.is_dynamo_compiling() or isinstance(value, torch.SymInt):
        return value
    return whole_number(value, name, 0, MOST)


def _held(values: Sequence[Any] | None) -> list[Any] | None:
    """Return a list of this call's own: backward reads it, too."""
    if values is None or torch.compiler.is_dynamo_compiling():
        return None if values is None else list(values)
    try:
        found = None if isinstance(values, (str, bytes)) else list(values)
    except TypeError:
        found = None
    if found is None:
        raise InputError(f"axes={values!r:.80}: a list is needed, 'rows' or 'contraction' a weight")
    for i, axis in enumerate(found):
        if not isinstance(axis, str):
            raise InputError(f"axes[{i}]={axis!r:.80}: it is 'rows' or 'contraction'")
    return found


def _needing(like: Tensor) -> Tensor:
    """Return a row like another tensor's that needs a gradient, so that backward is joined."""
    if torch.compiler.is_dynamo_compiling():  # which takes no new leaf
        return _LEAF.to(like).expand(1, like.shape[1])
    return like.new_zeros((1, like.shape[1])).requires_grad_()


def _needs(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.requires_grad


def _pairs(x: Any, w: Any) -> tuple[list[Any], list[Any]]:
    """Return inputs and weights as lists of one length."""
    if isinstance(x, Tensor) and isinstance(w, Tensor):
        return [x], [w]
    lists = [list(each) if isinstance(each, (tuple, list)) else [each] for each in (x, w)]
    xs, ws = lists
    if len(xs) != len(ws) or not xs:
        raise InputError(f"{len(xs)} inputs, {len(ws)} weights: give pairs of x and w")
    return xs, ws


def _several(w: Any) -> list[Any]:
    """Return weights as a list; what is none, an array or a class say, is refused later."""
    if isinstance(w, (tuple, list)):
        return list(w)
    if isinstance(w, (Tensor, type)) or hasattr(w, "shape") or not hasattr(w, "__iter__"):
        return [w]
    return list(w)


def _listed(w: Any, bias: Any) -> tuple[list[Any], list[Any], list[bool]]:
    """Return weights, biases, and which weights have one."""
    weights = _several(w)
    if bias is None:
        return weights, [], [False] * len(weights)
    each = list(bias) if isinstance(bias, (tuple, list)) else [bias] * len(weights)
    return (
        weights,
        [offset for offset in each if offset is not None],
        [offset is not None for offset in each],
    )
