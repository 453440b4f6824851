"""Checks of the arrays of an embedding: tables, indices, offsets and weights of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ficco.core.checking import check_sum, whole_numbers
from ficco.core.errors import InputError, shown
from ficco.operators.arrays import (
    Library,
    check_most,
    common_dtype,
    equal_columns,
    integer_row,
    matrix,
    row_contiguous,
    weight_row,
)
from ficco.operators.problem import Problem, chunk_sizes
from ficco.operators.problem_checks import Output
from ficco.operators.registry import Array, Arrays, Posed
from ficco.operators.shapes import check_bags

_MOST_INT32_ROWS = 2**31 - 1


def pose(
    name: str,
    library: Library,
    tables: Sequence[Sequence[Array]],
    indices: Sequence[Sequence[Array]],
    offsets: Sequence[Sequence[Array]],
    rows: Sequence[int] | None = None,
    mode: Any = "sum",
    weights: Sequence[Any] | None = None,
) -> Posed | list[list[Array]]:
    """Return the problem of tables [rows, d], indices and offsets of the batch, and its inputs.

    `mode` is one for all tables, or a list per rank; `weights` is None, or a list per rank.
    """
    world = len(tables)
    of_ranks = _of_ranks(mode, "mode", world), _of_ranks(weights, "weights", world)
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
    arrays, modes = [], []
    for rank in range(world):
        own_mode, own_weights = (each[rank] for each in of_ranks)
        modes.append(bag_modes(own_mode, own_weights, len(tables[rank]), f"[{rank}]"))
        lists = tables[rank], indices[rank], offsets[rank]
        arrays.append(_pose_rank(rank, *lists, modes[rank], own_weights, library))
    counts = [len(own_tables) for own_tables in tables]
    index_dtype, batch = _dtype_and_batch(arrays, counts)
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
        modes=tuple(modes) if any(set(own) - {"sum"} for own in modes) else (),
        index_dtype=index_dtype,
    )  # fmt: skip
    return Posed(problem, arrays)


def _pose_rank(
    rank: int,
    tables: Sequence[Array],
    indices: Sequence[Array],
    starts: Sequence[Array],
    modes: Sequence[str],
    weights: Any,
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
        check_height(table.shape[0], index.dtype.name, f"tables{where}")  # before it is copied
        if library.immediate:
            check_bags(index[0], start[0], table.shape[0], where)
        arrays |= {
            f"table{i}": row_contiguous(table, library),
            f"indices{i}": index,
            f"offsets{i}": start,
        }
        if modes[i] == "weighted":
            count = int(index.size)
            arrays[f"weights{i}"] = weight_row(weights[i], f"weights{where}", count, rank, library)
    return arrays


def _of_ranks(value: Any, name: str, world: int) -> Sequence[Any]:
    """Return an option as a list with an entry for each rank."""
    if value is None or isinstance(value, str):
        return [value] * world
    if not isinstance(value, (tuple, list)) or len(value) != world:
        raise InputError(f"{name}={shown(value)}: a list with an entry for each of {world} ranks")
    return value


def bag_modes(mode: Any, weights: Any, count: int, where: str = "") -> tuple[str, ...]:
    """Return how each of `count` tables is pooled, see `Problem.modes`.

    Args:
        mode: "sum" or "mean", or a list with one of them for each table.
        weights: None, or a list with an array, or None, for each table.
        count: number of tables.
        where: follows the names of the arguments in messages.

    Raises:
        InputError: an entry is missing or unknown, or a mean has weights.
    """
    for name, value in (("mode", mode), ("weights", weights)):
        listed = isinstance(value, (tuple, list))
        if listed and len(value) != count:
            raise InputError(f"{name}{where} has {len(value)} entries; there are {count} tables")
        if not listed and not (value is None if name == "weights" else isinstance(value, str)):
            others = "None, or a list" if name == "weights" else "'sum', 'mean', or a list"
            raise InputError(
                f"{name}{where}: {type(value).__name__} found; give {others} with an entry per "
                "table"
            )
    if isinstance(mode, str):
        _check_mode(mode, f"mode{where}")
    wanted = [mode] * count if isinstance(mode, str) else list(mode)
    given = [None] * count if weights is None else list(weights)
    for i, (each, own) in enumerate(zip(wanted, given, strict=True)):
        place = where if isinstance(mode, str) else f"{where}[{i}]"
        _check_mode(each, f"mode{place}")
        if own is not None and each == "mean":
            raise InputError(
                f"weights{where}[{i}] with mode{place}='mean': weights are for sums only; leave "
                "one of them out"
            )
    pairs = zip(wanted, given, strict=True)
    return tuple(["weighted" if own is not None else each for each, own in pairs])


def _check_mode(mode: Any, name: str) -> None:
    if not isinstance(mode, str) or mode not in ("sum", "mean"):
        raise InputError(f"{name}={shown(mode)}: 'sum' or 'mean' is needed")


def check_height(height: int, index_dtype: str, name: str) -> None:
    """Refuse a table with more rows than indices of a dtype can name.

    Raises:
        InputError: int32 indices, and 2^31 rows or more.
    """
    if index_dtype == "int32" and height > _MOST_INT32_ROWS:
        raise InputError(
            f"{name} has {height} rows, and its indices are int32; give int64 indices and offsets"
        )


def _dtype_and_batch(arrays: Sequence[Arrays], counts: Sequence[int]) -> tuple[str, int]:
    """Return the dtype of all indices and offsets, and the number of bags of every table."""
    named = [
        (f"[{rank}][{i}]", own[f"indices{i}"], own[f"offsets{i}"])
        for rank, own in enumerate(arrays)
        for i in range(counts[rank])
    ]
    first, index, start = named[0]
    dtype, batch = str(index.dtype.name), int(start.size)
    for where, *pair in named:
        for name, array in zip(("indices", "offsets"), pair, strict=True):
            if array.dtype.name != dtype:
                raise InputError(
                    f"{name}{where} is {array.dtype.name}, indices{first} is {dtype}; give all "
                    "indices and offsets in one dtype"
                )
        if pair[1].size != batch:
            raise InputError(
                f"offsets{where} has {pair[1].size} entries, offsets{first} has {batch}; all need "
                "one per bag"
            )
    return dtype, batch


def _of_tables(entry: Any, name: str) -> list[Any]:
    """Return a rank's entries for its tables as a list; the rows of one array also work."""
    if isinstance(entry, (tuple, list)) or getattr(entry, "ndim", 0) > 0:
        return list(entry)
    raise InputError(f"{name}: {type(entry).__name__} found; give a list with an array per table")
