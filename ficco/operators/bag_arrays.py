"""Checks of the arrays of an embedding: tables, indices, offsets and weights of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ficco.checking import check_sum, whole_numbers
from ficco.errors import InputError, shown
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
from ficco.problem import Output, Problem, chunk_sizes
from ficco.registry import Array, Arrays, Posed

__all__ = ["bag_modes", "check_height", "pose", "wrong_bags"]

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
        own = _pose_rank(rank, tables[rank], indices[rank], offsets[rank], library)
        arrays.append(own | _pose_weights(rank, modes[rank], own_weights, own, library))
    index_dtype = _index_dtype(arrays)
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
        modes=tuple(modes) if any(set(own) - {"sum"} for own in modes) else (),
        index_dtype=index_dtype,
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
        check_height(table.shape[0], index.dtype.name, f"tables{where}")  # before it is copied
        if library.immediate:
            check_bags(index[0], start[0], table.shape[0], where)
        arrays |= {
            f"table{i}": row_contiguous(table, library),
            f"indices{i}": index,
            f"offsets{i}": start,
        }
    return arrays


def _pose_weights(
    rank: int, modes: Sequence[str], weights: Any, arrays: Arrays, library: Library
) -> dict[str, Array]:
    """Return the weights of a rank's weighted tables."""
    return {
        f"weights{i}": weight_row(
            weights[i], f"weights[{rank}][{i}]", int(arrays[f"indices{i}"].size), rank, library
        )
        for i, mode in enumerate(modes)
        if mode == "weighted"
    }


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


def _index_dtype(arrays: Sequence[Arrays]) -> str:
    """Return the dtype of all indices and offsets."""
    found = {
        f"{name}[{rank}][{i}]": str(own[f"{name}{i}"].dtype.name)
        for rank, own in enumerate(arrays)
        for i in range(_tables_in(own))
        for name in ("indices", "offsets")
    }
    first, dtype = next(iter(found.items()))
    for name, other in found.items():
        if other != dtype:
            raise InputError(
                f"{name} is {other}, {first} is {dtype}; give all indices and offsets in one dtype"
            )
    return dtype


def _tables_in(arrays: Arrays) -> int:
    return sum(name.startswith("table") for name in arrays)


def _batch(arrays: Sequence[Arrays]) -> int:
    """Return the number of bags of every table."""
    counts = {
        f"offsets[{rank}][{i}]": int(own_arrays[f"offsets{i}"].size)
        for rank, own_arrays in enumerate(arrays)
        for i in range(_tables_in(own_arrays))
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


def check_bags(index: Array, start: Array, height: int, where: str) -> None:
    begins_at_0 = not start.size or start[0] == 0
    fits = begins_at_0 and not (start[1:] < start[:-1]).any() and not (start > index.size).any()
    if not fits or (index.size and not (index.min() >= 0 and index.max() < height)):
        raise wrong_bags(index, start, height, where)


def wrong_bags(index: Array, start: Array, height: int, where: str) -> InputError:
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
