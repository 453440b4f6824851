"""embedding_all_to_all: a rank pools its tables for the whole batch; each gets its batch slice.

The result is y_r [b_r, all tables of all ranks side by side].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from ficco.checking import check_sum, whole_numbers
from ficco.errors import InputError
from ficco.operators.arrays import (
    Library,
    check_most,
    common_dtype,
    equal_columns,
    integer_row,
    matrix,
    row_contiguous,
)
from ficco.operators.blocks import Blocks, Incoming, Outgoing
from ficco.operators.functions import CALL, rounded_length
from ficco.operators.products import check_one_output, one_output
from ficco.operators.reference import is_tensor, library_of, wide, zero_of
from ficco.problem import POOLING, TABLES, Output, Problem, check_per_rank, chunk_sizes, offsets
from ficco.registry import (
    Array,
    Arrays,
    Draw,
    Exact,
    Expected,
    Flow,
    Function,
    Kept,
    Local,
    Operand,
    Operator,
    Posed,
)
from ficco.symbolic import Source

__all__ = ["OPERATOR"]


def _check(problem: Problem) -> None:
    p = problem
    check_one_output(p)
    for name, per_rank in (("tables", p.tables), ("lookups", p.lookups)):
        if len(per_rank) != p.world:
            raise InputError(
                f"{name}: {len(per_rank)} entries found, {p.world} are needed, one per rank"
            )
        for rank, sizes in enumerate(per_rank):
            check_per_rank(f"{name}[{rank}]", sizes, len(p.tables[rank]), "tables of that rank")
    if not any(p.tables):
        raise InputError("tables: no rank has any")


def _fields(world: int, m: int, n: int, k: int, rows: Sequence[int]) -> dict[str, Any]:
    return {
        **one_output(world, n),
        "tables": ((k,) * TABLES,) * world,
        "lookups": ((m * POOLING,) * TABLES,) * world,
    }


def _result_shapes(problem: Problem, rank: int) -> list[tuple[int, int]]:
    return [(problem.rows[rank], problem.n * sum(len(tables) for tables in problem.tables))]


def _operands(problem: Problem, rank: int) -> list[Operand]:
    p = problem
    operands = [Operand("y0", "output", *p.result_shapes(rank)[0], p.dtype)]
    for i, rows in enumerate(p.tables[rank]):
        operands += [
            Operand(f"table{i}", "weight", rows, p.n, p.dtype),
            Operand(f"indices{i}", "input", 1, p.lookups[rank][i], "int64"),
            Operand(f"offsets{i}", "input", 1, p.m, "int64"),
        ]
    return operands


def _meaning(problem: Problem, rank: int) -> Iterator[Expected]:
    p, column = problem, 0
    begin = offsets(p.rows)[rank]
    for s in range(p.world):
        for i in range(len(p.tables[s])):
            if p.rows[rank]:
                content = Source((s, f"bags of table{i}"), begin, -column)
                yield Expected("y0", 0, p.rows[rank], column, column + p.n, content)
            column += p.n


def _blocks(problem: Problem, rank: int) -> Blocks:
    """Every rank has the whole batch of its tables; rank d gets its rows, next to other tables."""
    first, world = offsets(problem.rows), problem.world
    return Blocks(
        rank,
        tuple(Outgoing(first[d], problem.rows[d], 0) for d in range(world)),
        tuple(Incoming(0, problem.rows[rank]) for _ in range(world)),
        max(problem.rows),
    )


def _inputs(problem: Problem, rank: int, draw: Draw) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for i, rows in enumerate(problem.tables[rank]):
        lookups = problem.lookups[rank][i]
        arrays[f"table{i}"] = draw.normal(rows, problem.n)
        arrays[f"indices{i}"] = draw.integers(max(rows, 1), lookups)
        arrays[f"offsets{i}"] = draw.rising((lookups if rows else 0) + 1, problem.m)
    return arrays


def _reference(
    problem: Problem, inputs: Sequence[Arrays], ranks: Sequence[int]
) -> list[list[Exact]]:
    return [[_pooled(problem, inputs, rank)] for rank in ranks]


def _pooled(problem: Problem, inputs: Sequence[Arrays], rank: int) -> Exact:
    first = offsets(problem.rows)
    begin, end = first[rank], first[rank + 1]
    values, magnitudes, longest = [], [], 1
    for arrays, tables in zip(inputs, problem.tables, strict=True):
        for i in range(len(tables)):
            table, indices = wide(arrays[f"table{i}"]), arrays[f"indices{i}"].ravel()
            edges = [*arrays[f"offsets{i}"].ravel()[begin : end + 1].tolist(), len(indices)]
            edges = edges[: end - begin + 1]
            values.append(_bags(table, indices, edges))
            magnitudes.append(_bags(abs(table), indices, edges))
            longest = max(longest, *(b - a for a, b in pairwise(edges)), 1)
    library = library_of(values[0])
    value = library.concatenate(values, axis=1)
    magnitude = library.concatenate(magnitudes, axis=1)
    return Exact(value, magnitude, zero_of(value), longest)


def _bags(table: Array, indices: Array, edges: Sequence[int]) -> Array:
    """Return sums of the table's rows; bag i has the indices from edges[i] to edges[i+1]."""
    library = library_of(table)
    if not is_tensor(table):
        sums = [table[indices[a:b]].sum(axis=0) for a, b in pairwise(edges)]
        return library.array(sums).reshape(len(edges) - 1, table.shape[1])
    chosen = indices[edges[0] : edges[-1]]
    if not len(chosen):
        return table.new_zeros((len(edges) - 1, table.shape[1]))
    starts = chosen.new_tensor(edges[:-1]) - edges[0]
    return library.nn.functional.embedding_bag(chosen, table, starts, mode="sum")


def _pose(
    name: str,
    library: Library,
    tables: Sequence[Sequence[Array]],
    indices: Sequence[Sequence[Array]],
    offsets: Sequence[Sequence[Array]],
    rows: Sequence[int] | None = None,
) -> Posed | list[list[Array]]:
    """Return the problem of tables [rows, d], indices and offsets of the batch, and its inputs."""
    world = len(tables)
    tables, indices, offsets = (
        [_of_tables(entry, f"{argument}[{rank}]") for rank, entry in enumerate(entries)]
        for argument, entries in (("tables", tables), ("indices", indices), ("offsets", offsets))
    )
    flat = [
        matrix(table, f"tables[{r}][{i}]", r, library)
        for r, own_tables in enumerate(tables)
        for i, table in enumerate(own_tables)
    ]
    if not flat:
        raise InputError("tables: the lists of all ranks are empty; give at least one table")
    dtype = common_dtype(flat, "tables")
    equal_columns(flat, "tables", "rows, d")
    arrays = [
        _pose_rank(rank, tables[rank], indices[rank], offsets[rank], library)
        for rank in range(world)
    ]
    batch = _batch(arrays)
    sizes = chunk_sizes(batch, world) if rows is None else whole_numbers(rows, "rows")
    check_sum(sizes, "rows", world, batch, "the number of offsets of each table")
    dimension = flat[0].shape[1]
    check_most("tables", d=dimension)
    if not (batch and dimension):  # nothing is sent
        return [
            [library.repeated((sizes[r], dimension * len(flat)), dtype, r)] for r in range(world)
        ]
    problem = Problem(
        name, world, sizes, 1, (Output((dimension,) * world),), dtype.name,
        tables=tuple(tuple(table.shape[0] for table in own_tables) for own_tables in tables),
        lookups=tuple(tuple(len(index) for index in own_indices) for own_indices in indices),
    )  # fmt: skip
    return Posed(problem, arrays)


def _pose_rank(
    rank: int,
    tables: Sequence[Array],
    indices: Sequence[Array],
    starts: Sequence[Array],
    library: Library,
) -> dict[str, Array]:
    if not len(tables) == len(indices) == len(starts):
        raise InputError(
            f"rank {rank} has {len(tables)} tables, {len(indices)} indices and {len(starts)} "
            "offsets; give one of each per table"
        )
    arrays: dict[str, Array] = {}
    for i, table in enumerate(tables):
        where = f"[{rank}][{i}]"
        index = integer_row(indices[i], f"indices{where}", rank, library)
        start = integer_row(starts[i], f"offsets{where}", rank, library)
        if library.immediate:
            _check_bags(index[0], start[0], table.shape[0], where)
        arrays |= {
            f"table{i}": row_contiguous(table, library),
            f"indices{i}": index,
            f"offsets{i}": start,
        }
    return arrays


def _batch(arrays: Sequence[Arrays]) -> int:
    """Return the number of bags of every table."""
    counts = {
        f"offsets[{rank}][{i}]": int(own_arrays[f"offsets{i}"].size)
        for rank, own_arrays in enumerate(arrays)
        for i in range(len(own_arrays) // 3)
    }
    first, batch = next(iter(counts.items()))
    for name, count in counts.items():
        if count != batch:
            raise InputError(
                f"{name} has {count} entries, {first} has {batch}; all need one per bag"
            )
    return batch


def _of_tables(entry: Any, name: str) -> list[Any]:
    """Return a rank's entries for its tables as a list; the rows of one array also work."""
    if isinstance(entry, (tuple, list)) or getattr(entry, "ndim", 0) > 0:
        return list(entry)
    raise InputError(f"{name}: {type(entry).__name__} found; give a list with an array per table")


def _check_bags(index: Array, start: Array, height: int, where: str) -> None:
    begins_at_0 = not start.size or start[0] == 0
    fits = begins_at_0 and not (start[1:] < start[:-1]).any() and not (start > index.size).any()
    if not fits or (index.size and not (index.min() >= 0 and index.max() < height)):
        raise _wrong_bags(index, start, height, where)


def _wrong_bags(index: Array, start: Array, height: int, where: str) -> InputError:
    """Return the error about the first wrong offset, or else the first wrong index."""
    indices, before = index.tolist(), 0
    for at, offset in enumerate(start.tolist()):
        found = f"offsets{where}[{at}]={offset}"
        if at == 0 and offset != 0:
            return InputError(f"{found}: the first offset must be 0")
        if offset < before:
            return InputError(f"{found}: an offset must not be below the one before, {before}")
        if offset > len(indices):
            return InputError(
                f"{found}: an offset may be at most {len(indices)}, the number of entries of "
                f"indices{where}"
            )
        before = offset
    at = next(at for at, row in enumerate(indices) if not 0 <= row < height)
    return InputError(
        f"indices{where}[{at}]={indices[at]}: an index must be 0 or more and below {height}, the "
        f"number of rows of tables{where}"
    )


# ---- the function of PyTorch:
# tables, indices, starts, like, counts, batch, rows, sparse, group, schedule, grain


def _flat(args: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    tables, indices, starts, like, *rest = args
    return [*tables, *indices, *starts, like], tuple(rest)


def _nested(tensors: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
    count = len(tensors) // 3
    lists = [list(tensors[i * count : (i + 1) * count]) for i in range(3)]
    return [*lists, tensors[-1], *rest]


def _shapes(ranks: Callable[[str], tuple[int, int]], *arguments: Any) -> Array:
    _, _, _, like, counts, batch, rows, _, group, *_ = arguments
    rank, world = ranks(group)
    sizes = rows if rows is not None else chunk_sizes(batch, world)
    return like.new_empty((sizes[rank], like.shape[1] * sum(counts)))


def _local(  # noqa: PLR0913 - the arguments of the function
    call: Any,
    tables: Sequence[Array],
    indices: Sequence[Array],
    starts: Sequence[Array],
    like: Array,
    counts: Sequence[int],
    batch: int,
    rows: Sequence[int] | None,
    sparse: bool,
) -> Local | Array:
    """Return this rank's batch slice of the pooled bags of all tables.

    `like` [any, dimension] has the dtype and device of all tables, for ranks without tables.
    `counts` is the number of tables per rank. `sparse` matters only to gradients.
    """
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
    for i, table in enumerate(tables):
        call.check(table, f"tables[{i}]", 2)
        if table.shape[1] != dimension:
            raise InputError(f"tables[{i}] is {list(table.shape)}; dimension={dimension}")
        call.check_integers(indices[i], f"indices[{i}]")
        call.check_integers(starts[i], f"offsets[{i}]")
        _check_local_bags(indices[i], starts[i], table.shape[0], batch, i)
    # In the order of `_flat`, so that a repeated call finds its matrices.
    tensors: dict[str, Array] = {f"table{i}": call.readable(each) for i, each in enumerate(tables)}
    tensors |= {f"indices{i}": call.row_of(each) for i, each in enumerate(indices)}
    tensors |= {f"offsets{i}": call.row_of(each) for i, each in enumerate(starts)}
    tensors["like"] = like
    if not sum(sizes) or not dimension or not sum(counts):  # empty: no communication
        return like.new_zeros((sizes[call.rank], dimension * sum(counts)))
    heights = [tuple([1] * count) for count in counts]
    lookups = [tuple([0] * count) for count in counts]
    heights[call.rank] = tuple(table.shape[0] for table in tables)
    lookups[call.rank] = tuple(_lookups_of(index) for index in indices)
    output = Output((dimension,) * call.world)
    problem = Problem(
        call.name, call.world, sizes, 1, (output,), call.dtype, tables=tuple(heights),
        lookups=tuple(lookups),
    )  # fmt: skip
    return Local(problem, tensors)


def _lookups_of(index: Array) -> int:
    """Return the number of lookups of a table's plan.

    On GPUs batches with about as many lookups have the same plan. What runs there takes the number
    from the matrix.
    """
    count: int = index.numel()
    return rounded_length(count) if index.is_cuda else count


def _lengths(tensors: int) -> range:
    """Return the places of the indices among the tensors of `_flat`."""
    count = tensors // 3
    return range(count, 2 * count)


def _check_local_bags(index: Array, start: Array, height: int, batch: int, i: int) -> None:
    """Reject invalid bags. Values are read only on the CPU: on GPUs this would synchronize."""
    if start.numel() != batch:
        raise InputError(f"offsets[{i}] has {start.numel()} entries, batch={batch}")
    if index.is_cuda:
        return
    rising = batch == 0 or (int(start[0]) == 0 and not bool((start[1:] < start[:-1]).any()))
    fits = rising and not bool((start > index.numel()).any())
    if not fits or (index.numel() and not (int(index.min()) >= 0 and int(index.max()) < height)):
        raise _wrong_bags(index, start, height, f"[{i}]")


def _keep(tensors: Sequence[Any], rest: Any, needs: Any, ys: Any) -> list[Any]:
    count = len(tensors) // 3
    return list(tensors[count : 3 * count])


def _gradient(call: Any, kept: Kept, dys: Sequence[Any]) -> list[Any]:
    """Columns of dy return to the rank of their tables, where lookups add them to rows.

    `like` needs a gradient on ranks that take part although none of their tables needs one.
    """
    counts, batch, rows, sparse, group, _, _ = kept.rest
    count = len(kept.shapes) // 3
    sizes = rows if rows is not None else chunk_sizes(batch, len(counts))
    arriving = call.return_bags(dys[0], counts, sizes, kept.shapes[-1][-1], group)
    bags, gradients = call.table_gradients(
        arriving,
        kept.tensors[:count],
        kept.tensors[count:],
        [shape[0] for shape in kept.shapes[:count]],
        kept.needs[:count],
        sparse,
        dys[0].new_empty((0, kept.shapes[-1][-1])),
    )
    gradients += [None] * (len(kept.shapes) - count)
    if kept.needs[-1]:
        gradients[-1] = call.run("token", (bags,)).expand(kept.shapes[-1])
    return gradients  # type: ignore[no-any-return]


OPERATOR = Operator(
    name="embedding_all_to_all",
    label="emb+A2A",
    about="pool the tables of a rank for the whole batch, and give each rank its part of it",
    flow=Flow("scatter", "bags", "move", "all_to_all", one_kernel="pool"),
    schedules=("pool_sm",),
    check=_check,
    fields=_fields,
    result_shapes=_result_shapes,
    operands=_operands,
    meaning=_meaning,
    blocks=_blocks,
    inputs=_inputs,
    reference=_reference,
    pose=_pose,
    function=Function(
        name="embedding_all_to_all",
        schema="(Tensor[] tables, Tensor[] indices, Tensor[] starts, Tensor like, int[] counts, "
        f"SymInt batch, SymInt[]? rows, bool sparse, {CALL}) -> Tensor",
        shapes=_shapes,
        flat=_flat,
        nested=_nested,
        local=_local,
        keep=_keep,
        gradient=_gradient,
        casts=False,
        leading=(-1, "tables[0]"),
        lengths=_lengths,
    ),
    per_rank=("tables", "indices", "offsets"),
)
