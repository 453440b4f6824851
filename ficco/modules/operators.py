"""This rank's part of every operator, on the tensors that it is given: checked, posed, run.

No gradient is recorded here. The arguments of each function are, in order, those of the custom
operator of its name in `library`; here `group` may also be a ProcessGroup, and `schedule` a
Schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from ficco.checking import whole_number
from ficco.errors import InputError
from ficco.modules import plain
from ficco.modules.auto import AUTO
from ficco.modules.call_cache import find, key_of, matrix_of, readable, row_of
from ficco.modules.calling import Call, check_dense, check_held
from ficco.private.torch_core import unsafe_view
from ficco.problem import MOST, Output, Problem, chunk_sizes
from ficco.schedule import Schedule
from ficco.selector.candidates import few_rows

__all__ = [
    "all_gather_matmul",
    "all_to_all_matmul",
    "column_matmul",
    "embedding_all_to_all",
    "exchange_rows",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "token",
]

Tensor = torch.Tensor


def all_gather_matmul(  # noqa: PLR0913 - a custom operator has no keywords to group
    x: Tensor,
    w: Sequence[Tensor],
    bias: Sequence[Tensor],
    biased: Sequence[bool],
    axes: Sequence[str] | None,
    rows: Sequence[int] | None,
    gathered: bool,
    group: Any,
    schedule: str | Schedule,
    grain: int | None,
) -> list[Tensor]:
    """Return a product per weight; where `gathered`, then the concatenation of all x, a matrix.

    `biased` says which weights have a bias.
    """
    key = key_of("gather", group, x, [*w, *bias], schedule, biased, rows, axes, grain, gathered)
    if (before := find(key)) is not None:
        return before.run([x, *_interleaved(w, bias, biased)])
    call = Call(group, x, "x", key)
    kinds = list(axes) if axes is not None else ["rows"] * len(w)
    if not len(w) == len(biased) == len(kinds) or not w:
        raise InputError(
            f"{len(w)} weights, {len(biased)} biases, {len(kinds)} axes: give one of each"
        )
    sizes = call.rows_of(rows)
    m, k = sum(sizes), x.shape[-1]
    outputs, given, offsets = [], {"x": call.matrix}, iter(bias)
    for i, (weight, has, axis) in enumerate(zip(w, biased, kinds, strict=True)):
        name = f"w[{i}]" if len(w) > 1 else "w"
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
        outputs.append(Output(columns, f"w{i}", axis, bias=has))
        given[f"w{i}"] = weight
        if has:
            given[f"bias{i}"] = call.row(next(offsets), weight.shape[1], f"bias[{i}]")
    if gathered:
        outputs.append(Output((k,) * call.world, "", "gathered"))
    alone = call.world == 1 and not all(output.columns[0] for output in outputs)
    if not m or not k or alone:
        high = sum(rows) if rows is not None else call.first * call.world
        whole = call.matrix if alone else call.matrix.new_zeros((m, k))
        return _multiplied(call, outputs, given, whole, high)
    problem = Problem("all_gather_matmul", call.world, sizes, k, tuple(outputs), call.dtype)
    return call.run(problem, given, schedule, grain)


def _multiplied(
    call: Call, outputs: Sequence[Output], given: dict[str, Tensor], whole: Tensor, high: int
) -> list[Tensor]:
    """Return the products of a gathered x for which nobody is asked: it has no element, say.

    `high` is the first dimension that it has for the user.
    """
    found = []
    for i, output in enumerate(outputs):
        if output.axis == "gathered":
            found.append(whole.clone())
            continue
        y = (whole.t() if output.axis == "contraction" else whole) @ given[output.operand]
        y = y + given[f"bias{i}"] if output.bias else y
        shape = (high, *call.inner, y.shape[1])
        found.append(y if output.axis == "contraction" else unsafe_view(y, shape))
    return found


def _interleaved(
    w: Sequence[Tensor], bias: Sequence[Tensor], biased: Sequence[bool]
) -> list[Tensor]:
    """Return every weight with its bias behind it."""
    if not bias:
        return list(w)
    offsets, found = iter(bias), []
    for weight, has in zip(w, biased, strict=True):
        found.append(weight)
        if has:
            found.append(next(offsets))
    return found


def matmul_reduce_scatter(
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    bias: Tensor | None,
    rows: Sequence[int] | None,
    group: Any,
    schedule: str | Schedule,
    grain: int | None,
) -> Tensor:
    """Return this rank's rows of the sum of all ranks' products, of several pairs each."""
    x, w = _as_pairs(x, w, schedule)
    key = key_of("scatter", group, x[0], (*x[1:], *w, bias), schedule, rows, grain)
    if (before := find(key)) is not None:
        return before.run(_in_pairs(x, w, bias))[0]
    call, high = Call(group, x[0], "x", key), x[0].shape[0]
    if rows is None and high % call.world:
        raise InputError(
            f"x has {high} rows for {call.world} ranks, which do not divide evenly; pass "
            "rows=, how many each rank gets"
        )
    even = (high // call.world,) * call.world
    each = rows if rows is not None else even
    sizes = call.rows_of(each, total=high)
    mine = int(each[call.rank])
    return _reduce("matmul_reduce_scatter", call, x, w, sizes, bias, schedule, grain, mine)


def matmul_all_reduce(
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    bias: Tensor | None,
    group: Any,
    schedule: str | Schedule,
    grain: int | None,
) -> Tensor:
    """Return the sum of all ranks' products, of several pairs each."""
    x, w = _as_pairs(x, w, schedule)
    key = key_of("reduce", group, x[0], (*x[1:], *w, bias), schedule, grain)
    if (before := find(key)) is not None:
        return before.run(_in_pairs(x, w, bias))[0]
    call = Call(group, x[0], "x", key)
    sizes = chunk_sizes(call.matrix.shape[0], call.world)
    return _reduce("matmul_all_reduce", call, x, w, sizes, bias, schedule, grain, call.first)


def _as_pairs(
    x: Sequence[Tensor], w: Sequence[Tensor], schedule: str | Schedule
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return pairs whose products are added up: as they are, or side by side as one.

    Copies that put them side by side take as long as they are large; a pair more, as the product.
    Kernels that multiply few rows and store at peers take one pair.
    """
    if len(x) == 1 or len(x) != len(w):
        return x, w
    if any(_odd(a, b, x[0], w[0]) for a, b in zip(x, w, strict=True)):
        return x, w  # which is checked later
    m, n = math.prod(x[0].shape[:-1]), w[0].shape[1]
    copied = (m + n) * sum(b.shape[0] for b in w)
    try:
        few = schedule == AUTO and m <= few_rows("matmul_all_reduce")
        stored = few or _stores(schedule)
    except (TypeError, ValueError):  # no schedule
        return x, w  # which is checked later
    if stored or copied <= (len(x) - 1) * m * n:
        return [torch.cat(list(x), dim=-1)], [torch.cat(list(w))]
    return x, w


def _odd(x: Any, w: Any, other_x: Tensor, other_w: Tensor) -> bool:
    """Whether two matrices are no pair that could stand beside another one."""
    if not (isinstance(x, Tensor) and isinstance(w, Tensor) and w.dim() == 2 and x.dim() > 1):
        return True
    if not x.layout == w.layout == torch.strided or x.is_nested or w.is_nested:
        return True
    fits = x.shape[:-1] == other_x.shape[:-1] and w.shape[1:] == other_w.shape[1:]
    alike = x.dtype == other_x.dtype == w.dtype and x.device == other_x.device == w.device
    return not (fits and alike and x.shape[-1] == w.shape[0])


@lru_cache(maxsize=64)
def _stores(schedule: str | Schedule) -> bool:
    """Whether a kernel that multiplies is to store at peers."""
    return schedule != AUTO and Schedule.read(schedule).transport == "sm"


def _in_pairs(x: Sequence[Tensor], w: Sequence[Tensor], bias: Tensor | None) -> list[Tensor]:
    """Return the tensors of a sum in the order in which `_reduce` names them."""
    if len(x) == 1:
        found = [x[0], w[0]]
    else:
        found = [tensor for pair in zip(x, w, strict=True) for tensor in pair]
    return found if bias is None else [*found, bias]


def _reduce(  # noqa: PLR0913 - a call has as many facts
    op: str,
    call: Call,
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    sizes: tuple[int, ...],
    bias: Tensor | None,
    schedule: str | Schedule,
    grain: int | None,
    high: int,
) -> Tensor:
    """Return the sum, or this rank's rows of it; `high` is the result's first dimension."""
    if len(x) != len(w):
        raise InputError(f"{len(x)} inputs, {len(w)} weights: give pairs of x and w")
    n, each, given = 0, [], dict[str, Tensor]()
    for i, (a, b) in enumerate(zip(x, w, strict=True)):
        at = f"[{i}]" if len(x) > 1 else ""
        call.check(a, f"x{at}", 0)
        call.check(b, f"w{at}", 2)
        n = n if i else b.shape[1]
        if a.shape[:-1] != x[0].shape[:-1] or b.shape[1] != n:
            raise InputError(
                f"x[{i}] is {list(a.shape)}, w[{i}] is {list(b.shape)}; with x[0] "
                f"{list(x[0].shape)} and w[0] {list(w[0].shape)} they differ in k_r alone"
            )
        if a.shape[-1] != b.shape[0]:
            raise InputError(
                f"x{at} has {a.shape[-1]} columns, w{at} is {list(b.shape)}; x is [m, k_r], w is "
                "[k_r, n] (pass linear.weight.t())"
            )
        each.append(b.shape[0])
        given |= {f"x{i or ''}": matrix_of(a), f"w{i or ''}": b}
    depths = _for_me(sum(each), call)
    offset = None if bias is None else call.row(bias, n, "bias")
    if not sum(sizes) or not n or not sum(depths):  # of nothing; nobody is asked
        y = x[0].new_zeros((high, *call.inner, n))
        return y if offset is None else y + offset[0]
    pairs = tuple([tuple(each) if r == call.rank else (k,) for r, k in enumerate(depths)])
    output = Output((n,) * call.world, bias=bias is not None)
    problem = Problem(
        op, call.world, sizes, sum(depths), (output,), call.dtype, depths=depths,
        pairs=pairs if len(each) > 1 else (),
    )  # fmt: skip
    if offset is not None:
        given["bias0"] = offset
    return call.run(problem, given, schedule, grain)[0]


def column_matmul(
    x: Tensor,
    w: Sequence[Tensor],
    bias: Sequence[Tensor],
    biased: Sequence[bool],
    group: Any,
    schedule: str | Schedule,
    grain: int | None,
) -> list[Tensor]:
    """Return a product per weight; nothing is sent, the group serves the gradient."""
    if isinstance(x, Tensor):
        check_dense(x, "x")
        check_held(x, "x")
    if not isinstance(x, Tensor) or x.dim() not in (2, 3):
        found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"x is {found}; a tensor of 2 or 3 dimensions is needed")
    if not len(w) == len(biased) or not w:
        raise InputError(f"{len(w)} weights, {len(biased)} biases: give one of each")
    compiling = torch.compiler.is_dynamo_compiling()
    if not compiling and (m := math.prod(x.shape[:-1])) > MOST:
        whole_number(m, "m", 0, MOST)  # which refuses it
    offsets, ys = iter(bias), []
    for i, (weight, has) in enumerate(zip(w, biased, strict=True)):
        _check_local(x, weight, f"w[{i}]")
        if weight.dim() != 2 or weight.shape[0] != x.shape[-1]:
            raise InputError(
                f"w[{i}] is {list(weight.shape)}; with x {list(x.shape)} it is "
                f"[{x.shape[-1]}, n_r] (pass linear.weight.t())"
            )
        if not compiling and weight.shape[1] > MOST:
            raise InputError(f"w[{i}] has {weight.shape[1]} columns; {MOST} is the most of a rank")
        offset = next(offsets) if has else None
        if offset is not None:
            _check_local(x, offset, f"bias[{i}]")
            if tuple(offset.shape) not in ((weight.shape[1],), (1, weight.shape[1])):
                raise InputError(f"bias[{i}] is {list(offset.shape)}; it is [{weight.shape[1]}]")
            offset = offset.reshape(weight.shape[1])
        y = torch.nn.functional.linear(x, weight.t(), offset)
        ys.append(y.contiguous())
    return ys


def _check_local(x: Tensor, tensor: Any, name: str) -> None:
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name}: {type(tensor).__name__} found; a torch tensor is needed")
    check_dense(tensor, name)
    check_held(tensor, name)
    if (tensor.dtype, tensor.device) != (x.dtype, x.device):
        raise InputError(
            f"{name} is {tensor.dtype} on {tensor.device}, x is {x.dtype} on {x.device}; give one "
            "dtype and device"
        )


def all_to_all_matmul(
    x: Tensor,
    w: Tensor,
    splits: Sequence[int],
    group: Any,
    schedule: str | Schedule,
    grain: int | None,
) -> Tensor:
    """Return the product of the rows that this rank got; `splits` is flat, row by row."""
    return _exchange("all_to_all_matmul", x, w, splits, group, schedule, grain)


def matmul_all_to_all(
    x: Tensor,
    w: Tensor,
    splits: Sequence[int],
    group: Any,
    schedule: str | Schedule,
    grain: int | None,
) -> Tensor:
    """Return the blocks of all ranks' products that are for this rank."""
    return _exchange("matmul_all_to_all", x, w, splits, group, schedule, grain)


def _exchange(
    op: str,
    x: Tensor,
    w: Tensor,
    splits: Sequence[int],
    group: Any,
    schedule: str | Schedule,
    grain: int | None,
) -> Tensor:
    flat = tuple(splits)
    key = key_of(op, group, x, (w,), schedule, flat, grain)
    if (before := find(key)) is not None:
        return before.run((x, w))[0]
    call = Call(group, x, "x", key)
    call.check(x, "x", 2)
    call.check(w, "w", 2)
    if w.shape[0] != x.shape[1]:
        raise InputError(f"x is {list(x.shape)}, w is {list(w.shape)}; x is [rows, k], w is [k, n]")
    table = _table(flat, call)
    rows = tuple(sum(row) for row in table)
    if not sum(rows) or not x.shape[1] or not w.shape[1]:  # of nothing; nobody is asked
        return x.new_zeros((sum(row[call.rank] for row in table), w.shape[1]))
    output = Output((w.shape[1],) * call.world)
    problem = Problem(op, call.world, rows, x.shape[1], (output,), call.dtype, splits=table)
    return call.run(problem, {"x": x, "w": w}, schedule, grain)[0]


def exchange_rows(x: Tensor, splits: Sequence[int], group: Any) -> Tensor:
    """Send every rank its block of rows and return what this rank got, by a collective alone."""
    call = Call(group, x, "x")
    return plain.exchange(call.matrix, _table(tuple(splits), call), call.group, call.rank)


def token(x: Tensor) -> Tensor:
    """Return a zero [1] that compilers take for a result of x, so that they keep what made x."""
    return x.new_zeros(1)


def _table(flat: tuple[int, ...], call: Call) -> tuple[tuple[int, ...], ...]:
    """Return splits[s][r], of which this rank's row adds up to what it holds."""
    world = call.world
    if len(flat) != world * world:
        raise InputError(f"splits: {world} x {world} sizes are needed, splits[s][r]")
    table = tuple(tuple(flat[s * world : (s + 1) * world]) for s in range(world))
    if sum(table[call.rank]) != call.first:
        raise InputError(
            f"x has {call.first} rows, splits[{call.rank}] add up to {sum(table[call.rank])}"
        )
    return table


def embedding_all_to_all(  # noqa: PLR0913 - as many facts as the ranks must share
    tables: Sequence[Tensor],
    indices: Sequence[Tensor],
    starts: Sequence[Tensor],
    like: Tensor,
    counts: Sequence[int],
    batch: int,
    rows: Sequence[int] | None,
    group: Any,
    schedule: str | Schedule,
    grain: int | None,
) -> Tensor:
    """Return this rank's batch slice of the pooled bags of all tables.

    `like` [any, dimension] has the dtype and device of all tables, also where a rank has none;
    `counts` are tables per rank.
    """
    call = Call(group, like, "tables[0]")
    if len(counts) != call.world or min(counts) < 0 or counts[call.rank] != len(tables):
        raise InputError(
            f"tables_per_rank={list(counts)}: {call.world} sizes of 0 or more are needed, and this "
            f"rank ({call.rank}) has {len(tables)} tables"
        )
    if not len(tables) == len(indices) == len(starts):
        raise InputError(
            f"{len(tables)} tables, {len(indices)} indices, {len(starts)} offsets: one of each"
        )
    sizes = call.rows_of(rows if rows is not None else chunk_sizes(batch, call.world), total=batch)
    dimension = like.shape[1]
    given: dict[str, Tensor] = {"like": like}
    for i, table in enumerate(tables):
        call.check(table, f"tables[{i}]", 2)
        if table.shape[1] != dimension:
            raise InputError(f"tables[{i}] is {list(table.shape)}; dimension={dimension}")
        for tensor, name in ((indices[i], "indices"), (starts[i], "offsets")):
            _check_whole(tensor, f"{name}[{i}]", call.device)
        _check_bags(indices[i], starts[i], table.shape[0], batch, i)
        given[f"table{i}"] = readable(table) if table.is_cuda else table
        given[f"indices{i}"] = row_of(indices[i])
        given[f"offsets{i}"] = row_of(starts[i])
    if not sum(sizes) or not dimension or not sum(counts):  # of nothing; nobody is asked
        return like.new_zeros((sizes[call.rank], dimension * sum(counts)))
    heights = [tuple([1] * count) for count in counts]
    lookups = [tuple([0] * count) for count in counts]
    heights[call.rank] = tuple(table.shape[0] for table in tables)
    lookups[call.rank] = tuple(index.numel() for index in indices)
    output = Output((dimension,) * call.world)
    problem = Problem(
        "embedding_all_to_all", call.world, sizes, 1, (output,), call.dtype,
        tables=tuple(heights), lookups=tuple(lookups),
    )  # fmt: skip
    return call.run(problem, given, schedule, grain)[0]


def _check_whole(tensor: Tensor, name: str, device: torch.device) -> None:
    """Refuse what is no row of whole numbers on the device of the tables."""
    check_dense(tensor, name)
    if tensor.dtype != torch.int64:
        raise InputError(f"{name} is {tensor.dtype}; int64 is needed")
    if tensor.dim() != 1:
        raise InputError(f"{name} is {list(tensor.shape)}; it has 1 dimension")
    if tensor.device != device:
        raise InputError(f"{name} is on {tensor.device}, tables are on {device}; give one device")
    check_held(tensor, name)


def _check_bags(index: Tensor, start: Tensor, height: int, batch: int, i: int) -> None:
    """Refuse bags that cannot be. Values are looked at on the CPU only: GPUs would have to stop."""
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
