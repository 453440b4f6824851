"""The operators as functions of this rank's torch tensors, one process per rank.

    y = ficco.all_gather_matmul(x, linear.weight.t(), group=tp)

Every function is a collective call: all ranks of the group make it, with what they must agree on
(operator, rows, k or n, dtype, splits, schedule) equal. Tensors are on the CPU, where a call ends
before it returns, or all on this rank's GPU, where it is enqueued on the current stream. Inputs may
be 2-D or 3-D (the first dimension is split over ranks) and have any strides. There is no autograd
yet: inputs that require a gradient are refused while gradients are recorded.

`schedule="auto"` takes what is predicted to be fastest on the group's devices; `serial` where
nothing is, or where no profile of them is known (`FICCO_LOG=info` says which and why). Ranks choose
without a message: each takes the others to hold as many columns (as deep a part of k) as itself.
Where they do not, name a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ficco.errors import InputError
from ficco.modules import groups
from ficco.modules.again import key_of, known, readable, row_of
from ficco.modules.auto import AUTO
from ficco.modules.calling import Call
from ficco.problem import Output, Problem, chunk_sizes
from ficco.schedule import Schedule

__all__ = [
    "all_gather_matmul",
    "all_to_all_matmul",
    "embedding_all_to_all",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
]

DEFAULT = AUTO
Tensor = torch.Tensor


def all_gather_matmul(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    *,
    group: Any = None,
    rows: Sequence[int] | None = None,
    bias: Any = None,
    axes: Sequence[str] | None = None,
    schedule: str | Schedule = DEFAULT,
    grain: int | None = None,
) -> Any:
    """Multiply the concatenation of all ranks' rows with this rank's weight.

    Args:
        x: [m_r, k], or [s_r, b, k].
        w: [k, n_r] with any strides (pass linear.weight.t()), or several that share the gather.
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.
        rows: first sizes of x on all ranks, equal on all; None: all hold as many as this one.
        bias: [n_r], or one (or None) per weight.
        axes: per weight: "rows", or "contraction" for concat(x)^T . w with w [m, n_r].
        schedule: a schedule or its name; "auto": see above.
        grain: chunks per shard, instead of the schedule's.

    Returns:
        [m, n_r] (or [s, b, n_r]; along the contraction [k, n_r]); a tuple for several weights.

    Raises:
        InputError: tensors that do not fit; ScheduleError: a schedule that nothing implements;
        TimeoutExceeded, EngineError: the call failed on some rank, and the group needs `reset`.
    """
    several = not isinstance(w, Tensor)
    weights: list[Any] = list(w) if several else [w]
    biases = list(bias) if isinstance(bias, (tuple, list)) else [bias] * len(weights)
    tensors = [t for pair in zip(weights, biases, strict=False) for t in pair if t is not None]
    key = key_of("gather", group, (x, *weights, *biases), rows, axes, schedule, grain, several)
    if (before := known(key)) is not None:
        results = before.run((x, *tensors))
        return tuple(results) if several else results[0]
    call = Call(group, x, "x", key)
    kinds = list(axes) if axes is not None else ["rows"] * len(weights)
    if not len(weights) == len(biases) == len(kinds) or not weights:
        raise InputError(
            f"{len(weights)} weights, {len(biases)} biases, {len(kinds)} axes: give one of each"
        )
    sizes = call.rows_of(rows)
    m, k = sum(sizes), x.shape[-1]
    outputs, given = [], {"x": call.matrix}
    for i, (weight, offset, axis) in enumerate(zip(weights, biases, kinds, strict=True)):
        name = f"w[{i}]" if several else "w"
        inner = {"rows": k, "contraction": m}.get(axis)
        if inner is None:
            raise InputError(f"axes[{i}]={axis!r}: it is 'rows' or 'contraction'")
        call.check(weight, name, 2)
        if weight.shape[0] != inner:
            raise InputError(
                f"{name} is {list(weight.shape)}; with m={m}, k={k} and axis {axis!r} it is "
                f"[{inner}, n_r] (pass linear.weight.t())"
            )
        columns = _for_me(weight.shape[1], call)
        outputs.append(Output(columns, f"w{i}", axis, bias=offset is not None))
        given[f"w{i}"] = weight
        if offset is not None:
            given[f"bias{i}"] = call.row(offset, weight.shape[1], f"bias[{i}]")
    problem = Problem("all_gather_matmul", call.world, sizes, k, tuple(outputs), call.dtype)
    found = call.run(problem, given, schedule, grain)
    shaped = [call.shaped(y) if axis == "rows" else y for y, axis in zip(found, kinds, strict=True)]
    return tuple(shaped) if several else shaped[0]


def matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    *,
    group: Any = None,
    rows: Sequence[int] | None = None,
    bias: Tensor | None = None,
    schedule: str | Schedule = DEFAULT,
    grain: int | None = None,
) -> Tensor:
    """Sum all ranks' products, and return this rank's rows of the sum.

    Args:
        x: [m, k_r], or [s, b, k_r].
        w: [k_r, n] with any strides.
        group: as for `all_gather_matmul`.
        rows: first sizes of the result on all ranks; None: all get the same.
        bias: [n], added to this rank's rows.
        schedule: a schedule or its name; "auto": see above.
        grain: chunks per shard, instead of the schedule's.

    Returns:
        [m_r, n], or [s_r, b, n].

    Raises: as `all_gather_matmul`.
    """
    key = key_of("scatter", group, (x, w, bias), rows, schedule, grain)
    if (before := known(key)) is not None:
        return before.run((x, w) if bias is None else (x, w, bias))[0]
    call = Call(group, x, "x", key)
    if rows is None and x.shape[0] % call.world:
        raise InputError(
            f"x has {x.shape[0]} rows for {call.world} ranks, which do not divide evenly; pass "
            "rows=, how many each rank gets"
        )
    even = (x.shape[0] // call.world,) * call.world
    sizes = call.rows_of(rows if rows is not None else even, total=x.shape[0])
    return _reduce("matmul_reduce_scatter", call, w, sizes, bias, schedule, grain)


def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
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
    key = key_of("reduce", group, (x, w, bias), schedule, grain)
    if (before := known(key)) is not None:
        return before.run((x, w) if bias is None else (x, w, bias))[0]
    call = Call(group, x, "x", key)
    sizes = chunk_sizes(call.matrix.shape[0], call.world)
    return _reduce("matmul_all_reduce", call, w, sizes, bias, schedule, grain)


def _reduce(
    op: str,
    call: Call,
    w: Tensor,
    sizes: tuple[int, ...],
    bias: Tensor | None,
    schedule: str | Schedule,
    grain: int | None,
) -> Tensor:
    call.check(w, "w", 2)
    depth, n = w.shape
    if call.matrix.shape[1] != depth:
        raise InputError(
            f"x has {call.matrix.shape[1]} columns, w is {list(w.shape)}; x is [m, k_r], w is "
            "[k_r, n] (pass linear.weight.t())"
        )
    depths = _for_me(depth, call)
    output = Output((n,) * call.world, bias=bias is not None)
    problem = Problem(op, call.world, sizes, sum(depths), (output,), call.dtype, depths=depths)
    given = {"x": call.matrix, "w": w}
    if bias is not None:
        given["bias0"] = call.row(bias, n, "bias")
    return call.shaped(call.run(problem, given, schedule, grain)[0])


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
        schedule: a schedule or its name; "auto": see above.
        grain: chunks per block, instead of the schedule's.

    Returns:
        [rows received, n], by the rank they came from.

    Raises: as `all_gather_matmul`.
    """
    return _exchange("all_to_all_matmul", x, w, splits, group, schedule, grain)


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
    table = tuple(tuple(int(size) for size in row) for row in splits)
    key = key_of(op, group, (x, w), table, schedule, grain)
    if (before := known(key)) is not None:
        return before.run((x, w))[0]
    call = Call(group, x, "x", key)
    call.check(x, "x", 2)
    call.check(w, "w", 2)
    if w.shape[0] != x.shape[1]:
        raise InputError(f"x is {list(x.shape)}, w is {list(w.shape)}; x is [rows, k], w is [k, n]")
    if len(table) != call.world or any(len(row) != call.world for row in table):
        raise InputError(f"splits: {call.world} x {call.world} sizes are needed, splits[s][r]")
    if sum(table[call.rank]) != x.shape[0]:
        raise InputError(
            f"x has {x.shape[0]} rows, splits[{call.rank}] add up to {sum(table[call.rank])}"
        )
    rows = tuple(sum(row) for row in table)
    output = Output((w.shape[1],) * call.world)
    problem = Problem(op, call.world, rows, x.shape[1], (output,), call.dtype, splits=table)
    return call.run(problem, {"x": x, "w": w}, schedule, grain)[0]


def embedding_all_to_all(  # noqa: PLR0913 - as many facts as the ranks must share
    tables: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    *,
    tables_per_rank: Sequence[int],
    dimension: int,
    batch: int,
    dtype: torch.dtype = torch.float32,
    group: Any = None,
    rows: Sequence[int] | None = None,
    schedule: str | Schedule = DEFAULT,
    grain: int | None = None,
) -> Tensor:
    """Pool this rank's tables for the whole batch, and return its batch slice of all ranks' tables.

    Args:
        tables: this rank's, each [rows, dimension]; may be none.
        indices: per table [lookups], int64.
        offsets: per table [batch], int64: where each bag begins.
        tables_per_rank: how many each rank has, equal on all.
        dimension: columns of all tables.
        batch: bags of the whole batch.
        dtype: of all tables.
        group: as for `all_gather_matmul`.
        rows: batch slice of every rank; None: torch.chunk's rule.
        schedule: a schedule or its name; "auto": see above.
        grain: chunks per batch slice, instead of the schedule's.

    Returns:
        [its rows, dimension x all tables].

    Raises: as `all_gather_matmul`.
    """
    like = tables[0] if tables else torch.empty((0, dimension), dtype=dtype, device=_device(group))
    call = Call(group, like, "tables[0]")
    if len(tables_per_rank) != call.world or tables_per_rank[call.rank] != len(tables):
        raise InputError(
            f"tables_per_rank={list(tables_per_rank)}: {call.world} entries are needed, and this "
            f"rank ({call.rank}) has {len(tables)} tables"
        )
    if not len(tables) == len(indices) == len(offsets):
        raise InputError(
            f"{len(tables)} tables, {len(indices)} indices, {len(offsets)} offsets: one of each"
        )
    sizes = call.rows_of(rows if rows is not None else chunk_sizes(batch, call.world), total=batch)
    given: dict[str, Tensor] = {"like": like}
    for i, table in enumerate(tables):
        call.check(table, f"tables[{i}]", 2)
        if table.shape[1] != dimension:
            raise InputError(f"tables[{i}] is {list(table.shape)}; dimension={dimension}")
        _check_bags(indices[i], offsets[i], table.shape[0], batch, i)
        given[f"table{i}"] = readable(table) if table.is_cuda else table
        given[f"indices{i}"] = row_of(indices[i])
        given[f"offsets{i}"] = row_of(offsets[i])
    counts = [tuple([1] * count) for count in tables_per_rank]
    lookups = [tuple([0] * count) for count in tables_per_rank]
    counts[call.rank] = tuple(table.shape[0] for table in tables)
    lookups[call.rank] = tuple(index.numel() for index in indices)
    output = Output((dimension,) * call.world)
    problem = Problem(
        "embedding_all_to_all", call.world, sizes, 1, (output,), call.dtype,
        tables=tuple(counts), lookups=tuple(lookups),
    )  # fmt: skip
    return call.run(problem, given, schedule, grain)[0]


def _device(group: Any) -> torch.device:
    """Return where a rank without tables works: where its group is open, or can be."""
    if groups.opened(group):
        return torch.device(groups.opened(group)[0].device)
    backends = str(torch.distributed.get_backend_config(groups.process_group(group)))
    return torch.device("cpu" if "gloo" in backends else "cuda")


def _check_bags(index: Tensor, start: Tensor, height: int, batch: int, i: int) -> None:
    """Refuse bags that cannot be. Values are looked at on the CPU only: GPUs would have to stop."""
    if index.dtype != torch.int64 or start.dtype != torch.int64:
        raise InputError(f"indices[{i}] and offsets[{i}]: int64 is needed")
    if start.numel() != batch:
        raise InputError(f"offsets[{i}] has {start.numel()} entries, batch={batch}")
    if index.is_cuda:
        return
    ends = torch.cat([start.ravel(), torch.tensor([index.numel()])])
    if int(ends[0]) != 0 or bool((ends.diff() < 0).any()):
        raise InputError(
            f"offsets[{i}]: {batch} entries that begin at 0, never fall and stay within indices"
        )
    if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < height):
        raise InputError(f"indices[{i}]: found beyond the {height} rows of the table")


def _for_me(size: int, call: Call) -> tuple[int, ...]:
    """Return a size that this rank alone knows as one entry per rank; no peer's is looked at."""
    return tuple(size if rank == call.rank else max(size, 1) for rank in range(call.world))
