"""The operators as differentiable functions of this rank's torch tensors, one process per rank.

    y = ficco.all_gather_matmul(x, linear.weight.t(), group=tp)

Every function is a collective call: all ranks of the group make it, with equal operator, rows, k or
n, dtype, splits and schedule. Tensors are either on the CPU, where a call has finished when it
returns, or all on this rank's GPU, where it is enqueued on the current stream. Inputs are 2-D or
3-D (2-D for the two all-to-all functions), with any strides. Ranks split the first dimension.

Gradients are overlapped too, with the schedule and `grain` of the call, if an operator fits. The
backward pass is a collective call, too: inputs need a gradient on all ranks or on none, and all
ranks run the same backward. The total loss is the sum of the losses that ranks compute from their
outputs; if outputs are equal on all ranks, every rank computes the total loss. Second gradients are
not supported. torch.compile, make_fx, activation checkpointing, autocast (inputs are cast, as for
torch.mm) and capture of forward and backward into CUDA graphs work; transforms of torch.func and
DTensors raise an error.

`schedule="auto"` uses the schedule that is predicted to be fastest on the group's devices. It is
`serial` if none is faster, or if the devices have no profile (`FICCO_LOG=info` logs the choice and
its reason). Ranks choose without messages: each assumes that the others have the same n_r or k_r.
If these differ, name a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import is_initialized

from ficco.api import bags, fused_tables, torch_library
from ficco.api.arguments import copied_list, pairs_of, process_group, size, sizes, weights_of
from ficco.api.auto import AUTO
from ficco.api.autograd import dispatch, requires_grad
from ficco.api.call_cache import Form, repeatable
from ficco.api.calling import check_schedule
from ficco.api.groups import collective
from ficco.api.routes import DIRECT, SCRIPTING, refuse_script, survey
from ficco.api.table_optimizers import FusedOptimizer
from ficco.core.checking import true_or_false
from ficco.core.errors import InputError, shown
from ficco.core.private.torch_core import disable_dynamo
from ficco.operators import registry
from ficco.plan.schedule import Schedule

DEFAULT = AUTO
OPERATORS = torch_library.NAMES  # the custom operators; this import registers them
Tensor = torch.Tensor


@repeatable(
    Form(
        "all_gather_matmul", several=True, bias=True, rest=(None, None, False),
        unset=("rows", "axes"), flags=("save_gathered",),
    )
)  # fmt: skip
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

    A collective call: all ranks make it, after torch.distributed.init_process_group. It is
    differentiable. Backward is one matmul_reduce_scatter for x, and a GEMM with the gathered x for
    each weight.

    Args:
        x: [m_r, k], or [s_r, b, k].
        w: [k, n_r] with any strides (pass linear.weight.t()), or several that share the gather.
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.
        rows: first sizes of x by rank, the same list on all ranks; needed if they differ. None: all
            equal this rank's.
        bias: [n_r], or one (or None) per weight.
        axes: per weight: "rows", or "contraction" for concat(x)^T . w with w [m, n_r].
        schedule: a Schedule or its name; "auto", the default: the one predicted to be fastest.
        grain: chunks per shard, instead of the schedule's.
        save_gathered: keep the gathered x, p times as large as x, until backward, as plain PyTorch
            does. Copy engines copy it from the window during the GEMMs. False: keep only x, and
            gather it again in backward, for the weights' gradients. Nothing is kept if no weight
            records a gradient.

    Returns:
        [m, n_r] (or [s, b, n_r]; along the contraction [k, n_r]); a tuple for several weights.

    Raises:
        InputError: arguments do not fit, or (ScheduleError) no plan implements the schedule.
        EngineError: the call failed on some rank (TimeoutExceeded: a wait lasted too long); call
            `ficco.reset` on all ranks.

    Example:
        >>> x, w = torch.randn(64, 32), torch.randn(32, 16, requires_grad=True)  # x_r, w_r
        >>> ficco.all_gather_matmul(x, w).shape  # [64 x ranks, 16]; this is one rank alone
        torch.Size([64, 16])
    """
    weights, biases, biased = weights_of(w, bias)
    axes, rows = copied_list(axes), sizes("rows", rows)
    way = survey((x, *weights, *biases))
    keep_gathered = (
        true_or_false(save_gathered, "save_gathered")
        and way != DIRECT
        and torch.is_grad_enabled()
        and any(map(requires_grad, weights))
    )
    rest = (biased, axes, rows, keep_gathered, group, schedule, grain)
    outputs = dispatch("all_gather_matmul", (x, weights, biases, *rest), way)
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
    all weights, so the gradient is equal on all ranks. Without torch.distributed, the group has
    this rank only.

    Args:
        x: [m, k], or [s, b, k], equal on all ranks.
        w: [k, n_r] with any strides (pass linear.weight.t()), or several that share x.
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.
        bias: [n_r], or one (or None) per weight.
        schedule: for backward: a Schedule or its name; "auto", the default: the one predicted to
            be fastest.
        grain: chunks per shard, instead of the schedule's.

    Returns:
        [m, n_r], or [s, b, n_r]; a tuple for several weights.

    Raises:
        InputError: arguments do not fit, or (ScheduleError) no plan implements the schedule.
        EngineError: the call failed on some rank (TimeoutExceeded: a wait lasted too long); call
            `ficco.reset` on all ranks.

    Example:
        >>> x, w = torch.randn(64, 32), torch.randn(32, 16, requires_grad=True)
        >>> ficco.column_matmul(x, w).shape
        torch.Size([64, 16])
    """
    weights, biases, biased = weights_of(w, bias)
    if not torch.compiler.is_dynamo_compiling():
        check_schedule(schedule, grain, "matmul_all_reduce")  # for backward only
        if group is not None or is_initialized():
            group = process_group(group)  # backward refers to it, even once destroyed
    args = (x, weights, biases, biased, group, schedule, grain)
    outputs = dispatch("column_matmul", args, survey((x, *weights, *biases)))
    return outputs[0] if isinstance(w, Tensor) else tuple(outputs)


@repeatable(Form("matmul_reduce_scatter", bias=True, rest=(None,), unset=("rows",)))
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
        x: [m, k_r], or [s, b, k_r]; or several, whose products are summed.
        w: [k_r, n] with any strides; one per x.
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.
        rows: first sizes of the result by rank; None: all are equal.
        bias: [n], added to this rank's rows; its gradient is the sum over this rank's rows only.
        schedule: a Schedule or its name; "auto", the default: the one predicted to be fastest.
        grain: chunks per shard, instead of the schedule's.

    Returns:
        [m_r, n], or [s_r, b, n].

    Raises:
        InputError: arguments do not fit, or (ScheduleError) no plan implements the schedule.
        EngineError: the call failed on some rank (TimeoutExceeded: a wait lasted too long); call
            `ficco.reset` on all ranks.

    Example:
        >>> x, w = torch.randn(64, 32), torch.randn(32, 16)  # x [m, k_r], w_r [k_r, n]
        >>> ficco.matmul_reduce_scatter(x, w).shape  # [64 / ranks, 16]; this is one rank alone
        torch.Size([64, 16])
    """
    xs, ws = pairs_of(x, w)
    args = (xs, ws, bias, sizes("rows", rows), group, schedule, grain)
    way = survey((*xs, *ws, bias))
    return dispatch("matmul_reduce_scatter", args, way)  # type: ignore[no-any-return]


@repeatable(Form("matmul_all_reduce", bias=True))
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

    Args:
        x: [m, k_r], or [s, b, k_r]; or several, whose products are summed.
        w: [k_r, n] with any strides; one per x.
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.
        bias: [n], the same on all ranks, added once to the sum.
        schedule: a Schedule or its name; "auto", the default: the one predicted to be fastest.
        grain: chunks per shard, instead of the schedule's.

    Returns:
        [m, n], or [s, b, n].

    Raises:
        InputError: arguments do not fit, or (ScheduleError) no plan implements the schedule.
        EngineError: the call failed on some rank (TimeoutExceeded: a wait lasted too long); call
            `ficco.reset` on all ranks.

    Example:
        >>> x, w = torch.randn(64, 32), torch.randn(32, 16)  # x [m, k_r], w_r [k_r, n]
        >>> ficco.matmul_all_reduce(x, w).shape
        torch.Size([64, 16])
    """
    xs, ws = pairs_of(x, w)
    args = (xs, ws, bias, group, schedule, grain)
    return dispatch("matmul_all_reduce", args, survey((*xs, *ws, bias)))  # type: ignore[no-any-return]


@repeatable(Form("all_to_all_matmul", table="splits"))
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
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.
        schedule: a Schedule or its name; "auto", the default: the one predicted to be fastest.
        grain: chunks per block, instead of the schedule's.

    Returns:
        [rows received, n], ordered by source rank.

    Raises:
        InputError: arguments do not fit, or (ScheduleError) no plan implements the schedule.
        EngineError: the call failed on some rank (TimeoutExceeded: a wait lasted too long); call
            `ficco.reset` on all ranks.

    Example:
        >>> x, w, splits = torch.randn(6, 4), torch.randn(4, 2), [[6]]  # 2 ranks: [[2, 4], [3, 3]]
        >>> ficco.all_to_all_matmul(x, w, splits).shape
        torch.Size([6, 2])
    """
    return _exchange("all_to_all_matmul", x, w, splits, group, schedule, grain)


@repeatable(Form("matmul_all_to_all", table="splits"))
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

    Args:
        x: [sum of splits[rank], k]: the blocks for rank 0, 1, ... in this order.
        w: [k, n] with any strides.
        splits: splits[s][r] is the number of rows from rank s to rank r; equal on all ranks.
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.
        schedule: a Schedule or its name; "auto", the default: the one predicted to be fastest.
        grain: chunks per block, instead of the schedule's.

    Returns:
        [rows received, n], ordered by source rank; the rows of rank s are products with its w.

    Raises:
        InputError: arguments do not fit, or (ScheduleError) no plan implements the schedule.
        EngineError: the call failed on some rank (TimeoutExceeded: a wait lasted too long); call
            `ficco.reset` on all ranks.

    Example:
        >>> x, w, splits = torch.randn(6, 4), torch.randn(4, 2), [[6]]  # 2 ranks: [[2, 4], [3, 3]]
        >>> ficco.matmul_all_to_all(x, w, splits).shape
        torch.Size([6, 2])
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
    args = (x, w, _splits(splits), group, schedule, grain)
    return dispatch(op, args, survey((x, w)))  # type: ignore[no-any-return]


def _splits(splits: Any) -> list[Any]:
    """Return the splits by source and destination, one row behind another.

    Raises:
        InputError: they are not a square of whole numbers.
    """
    try:
        rows = [sizes(f"splits[{s}]", row) for s, row in enumerate(splits)]
        if {len(row) for row in rows} - {len(rows)}:
            raise TypeError
        return [size for row in rows for size in row]
    except (TypeError, RuntimeError):  # RuntimeError: of a DeviceMesh
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
    mode: str | Sequence[str] = "sum",
    weights: Sequence[Tensor | None] | None = None,
    sparse: bool = False,
    optimizer: FusedOptimizer | None = None,
    schedule: str | Schedule = DEFAULT,
    grain: int | None = None,
    **others: Any,
) -> Tensor:
    """Pool this rank's tables for the whole batch, and return its batch slice of all ranks' tables.

    Tables get dense or sparse gradients, or backward updates them. If some rank has no table, all
    ranks take part in backward whenever gradients are recorded, even if no table needs a gradient.

    With `optimizer`, tables get no gradient: backward sums the gradients of each row and updates
    the row once. Each backward is a step, so gradients cannot be accumulated over several
    backwards, clipped or scaled. Use a table in one call per step. A call has one backward.

    Args:
        tables: this rank's tables, each [rows, dimension]; may be empty.
        indices: per table [lookups], int32 or int64, one dtype for all tables of a rank.
        offsets: per table [batch], of that dtype: the start of each bag, without a last offset.
        tables_per_rank: number of tables by rank, the same list on all ranks.
        dimension: columns of all tables.
        batch: bags of the whole batch.
        dtype: of all tables; None: that of this rank's tables, float32 if it has none.
        device: of all tables; None: that of this rank's tables. If it has none: the device of the
            open group, else the current GPU if the group supports GPUs (nccl), else the CPU.
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.
        rows: size of the batch slice by rank; None: torch.chunk's rule.
        mode: "sum" or "mean" of the rows of a bag, or a list with one of them for each of this
            rank's tables. The mean of an empty bag is 0.
        weights: per table None, or float32 [lookups]: the rows of a sum are multiplied with them
            (`per_sample_weights` of torch.nn.functional.embedding_bag). None: no table has any.
            They get gradients, which are computed in the dtype of the tables.
        sparse: whether tables get sparse COO gradients, not coalesced: an index per lookup, and the
            gradient of its row as values. torch.compile leaves such a call out of its graphs.
        optimizer: a FusedSGD or FusedRowWiseAdagrad that has this rank's tables. torch.compile
            leaves such a call out of its graphs.
        schedule: a Schedule or its name; "auto", the default: the one predicted to be fastest.
        grain: chunks per batch slice, instead of the schedule's.
        others: no other options of embedding_bag are offered; padding_idx, include_last_offset,
            max_norm and the like are refused, with a way to do without.

    Returns:
        [rows of its slice, dimension x all tables].

    Raises:
        InputError: arguments do not fit, or (ScheduleError) no plan implements the schedule.
        EngineError: the call failed on some rank (TimeoutExceeded: a wait lasted too long); call
            `ficco.reset` on all ranks.

    Example:
        >>> table, bags = torch.randn(9, 4), [torch.tensor([1, 2, 5])]  # lookups of 2 bags
        >>> options = {"tables_per_rank": [1], "dimension": 4, "batch": 2}
        >>> ficco.embedding_all_to_all([table], bags, [torch.tensor([0, 2])], **options).shape
        torch.Size([2, 4])
        >>> sums = ficco.embedding_all_to_all(
        ...     [table], bags, [torch.tensor([0, 2])], weights=[torch.tensor([0.5, 0.5, 1])],
        ...     **options)
        >>> means = ficco.embedding_all_to_all(
        ...     [table], bags, [torch.tensor([0, 2])], mode="mean", **options)
        >>> torch.allclose(sums, means)
        True
    """
    bags.refuse_others(others)
    dimension, batch = size("dimension", dimension), size("batch", batch)
    if tables_per_rank is None:
        raise InputError("tables_per_rank=None: a list of the number of tables by rank is needed")
    tables_per_rank = sizes("tables_per_rank", tables_per_rank)
    fused_tables.check_optimizer(optimizer, sparse)
    tables, indices = bags.listed(tables, "tables"), bags.listed(indices, "indices")
    offsets = bags.listed(offsets, "offsets")
    modes, weights = bags.pooled_by(mode, weights, len(tables))
    like = bags.empty_like_tables(tables, dimension, dtype, device, group)
    differentiable = any(map(requires_grad, (*tables, *weights)))
    if 0 in tables_per_rank and torch.is_grad_enabled() and not differentiable:
        like = bags.with_gradient(like)
    lists = (tables, indices, offsets)
    shared = (like, tables_per_rank, batch, sizes("rows", rows), sparse)
    call = (group, schedule, grain)
    if optimizer is not None and torch.is_grad_enabled():
        return fused_tables.fused_call_outside_graphs(  # type: ignore[no-any-return]
            bags.WITH_MODES, optimizer, (*lists, weights, *shared, modes, *call)
        )
    name: str = bags.SUMMED
    args: tuple[Any, ...] = (*lists, *shared, *call)
    if any(each != "sum" for each in modes):
        name, args = bags.WITH_MODES, (*lists, weights, *shared, modes, *call)
    if sparse and torch.compiler.is_dynamo_compiling():
        return _sparse_call_outside_graphs(name, args)  # type: ignore[no-any-return]
    return dispatch(name, args, survey((*tables, *indices, *offsets, *weights, like)))  # type: ignore[no-any-return]


@disable_dynamo  # type: ignore[untyped-decorator]
def _sparse_call_outside_graphs(name: str, args: tuple[Any, ...]) -> Any:
    """Make a call whose gradients have no place in a graph of torch.compile."""
    function = registry.function(name)
    return dispatch(name, args, survey(function.flat(args)[0]))


for _function in (
    all_gather_matmul, all_to_all_matmul, column_matmul, embedding_all_to_all, matmul_all_reduce,
    matmul_all_to_all, matmul_reduce_scatter,
):  # fmt: skip
    setattr(_function, SCRIPTING, refuse_script)
