"""Updates of table rows by the sums of their gradients: SGD, row-wise Adagrad, or stored sums.

    keys, bags = list_lookups(tables, batch, across, arrays)
    sorted, order = sort(keys)                                # by the array library
    segments = find_segments(SortedLookups(sorted, order, bags), targets, arrays)
    update(segments, gradients, ADAGRAD, rate, epsilon)       # when the gradients are there

Sums are float32. Lookups are added in a fixed order, so equal inputs give equal bits; each row is
rounded once. The values of indices are not checked: they are in device memory, and reading them
would wait for the device.

A call repeats a launch that was described before, if only addresses and the numbers of lookups
differ, because a description takes the host much longer than a launch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from ficco.core.errors import EngineError
from ficco.kernels import loading
from ficco.kernels.arrays import Arrays, address, dtype_name, item_bytes, stride
from ficco.kernels.declarations import (
    FIND_SEGMENTS,
    LIST_LOOKUPS,
    UPDATE_ROWS,
    UPDATE_SPLIT_ROWS,
)
from ficco.kernels.one_kernel import ALIGN, power
from ficco.kernels.variants import Launch

STORE, SGD, ADAGRAD = range(3)  # kinds of updates
_LENGTHS = (8, 32)  # of the tuples of tables, which are part of a compiled kernel
MOST_TABLES = _LENGTHS[-1]  # of a launch
_TILE, _LISTED = 128, 1024  # lookups of a program
# The best of some block sizes on an H100 (bench/NOTES.md).
_WARPS, _THREADS = 2, 64
_LOOKUPS = 1  # rows of each segment that a step adds
_LEAST_COLS, _MOST_COLS, _MOST_BAGS = 16, 256, 16
_SPLIT_COLS = 128
_STEP, _STEPS = 16, 64  # tiles: grids are rounded up, so that few are described
_MOST = (1 << 31) - (1 << 25)  # lookups, and bags: positions past the last tile are int32, too


class TableLookups(NamedTuple):
    """The lookups of a table.

    Attributes:
        indices: [lookups], the rows of all bags, bag by bag.
        starts: [batch], the first lookup of each bag.
        first: key of the table's first row.
        column: the table's place among those of a bag's gradients.
    """

    indices: Any
    starts: Any
    first: int
    column: int


class SortedLookups(NamedTuple):
    """Lookups, sorted by the rows of the tables, which are stacked one below the other.

    Attributes:
        keys: int32 [lookups], sorted: the place of the row among the rows of all tables.
        order: int64 [lookups], the lookup of each key.
        bags: int32 [lookups], the row of the gradients of each lookup; not sorted.
        factors: float32 [lookups], which multiply the gradients; not sorted. None: all are 1.
    """

    keys: Any
    order: Any
    bags: Any
    factors: Any = None


class Target(NamedTuple):
    """A table whose rows are updated.

    Attributes:
        rows: [rows, dim], unit stride along rows.
        first: key of its first row.
        accumulators: float32 [rows], for Adagrad; None for others.
    """

    rows: Any
    first: int
    accumulators: Any = None


class Segments(NamedTuple):
    """What `find_segments` found; see the kernel.

    Attributes:
        lookups, targets: as given.
        starts, counts, bags, factors, places, squares_at: outputs of the kernel.
        arrays: the array library.
    """

    lookups: SortedLookups
    targets: tuple[Target, ...]
    starts: Any
    counts: Any
    bags: Any
    factors: Any
    places: Any
    squares_at: Any
    arrays: Arrays

    @property
    def total(self) -> int:
        """The number of lookups."""
        return int(self.lookups.keys.shape[0])


# ---- lists


def list_lookups(
    tables: Sequence[TableLookups], batch: int, across: int, arrays: Arrays
) -> tuple[Any, Any]:
    """Enqueue the kernel that lists the lookups of all tables, on the current stream.

    Args:
        tables: MOST_TABLES at most, with one lookup at least, and with rising `first`. Their
            indices have one dtype, and so have their starts.
        batch: bags of each table.
        across: tables of a bag's gradients.
        arrays: the array library.

    Returns:
        Keys and bags of `SortedLookups`; the keys are not sorted.

    Raises:
        EngineError: there are too many tables or lookups, or the kernel is not in the pack and
            cannot be compiled.
    """
    total = sum([each.indices.shape[0] for each in tables])
    if len(tables) > MOST_TABLES or max(total, batch * across) > _MOST:
        raise EngineError(
            f"{len(tables)} tables with {total} lookups and {batch} x {across} bags; a launch "
            f"takes up to {MOST_TABLES} tables, and {_MOST} lookups and bags"
        )
    keys, bags = arrays.empty(total, "int32"), arrays.empty(total, "int32")
    make = partial(list_launch, tables, batch, across, keys, bags, arrays)
    counts = _counts(tables)
    numbers = {f"begins.{i}": begin for i, begin in enumerate(_begins(tables))}
    numbers |= {f"counts.{i}": count for i, count in enumerate(counts)}
    key = (
        "list", dtype_name(tables[0].indices), dtype_name(tables[0].starts), batch, across,
        _grid(max(counts), _LISTED), *[(each.first, each.column) for each in tables],
    )  # fmt: skip
    filled = _filled(tables)
    pointers = [keys, bags, *[each.indices for each in filled], *[each.starts for each in filled]]
    loading.repeated(key, make, pointers, numbers, arrays)()
    return keys, bags


def list_launch(
    tables: Sequence[TableLookups], batch: int, across: int, keys: Any, bags: Any, arrays: Arrays
) -> Launch:
    """Return the launch of `list_lookups`, with its outputs."""
    filled, counts = _filled(tables), _counts(tables)
    arguments = {
        "keys": keys, "bags": bags,
        "indices": tuple([each.indices for each in filled]),
        "starts": tuple([each.starts for each in filled]),
        "begins": _begins(tables), "counts": counts,
        "firsts": tuple([each.first for each in filled]),
        "columns": tuple([each.column for each in filled]),
        "batch": batch, "across": across, "steps": batch.bit_length(), "TILE": _LISTED,
    }  # fmt: skip
    grid = (_grid(max(counts), _LISTED), len(tables))
    return Launch(LIST_LOOKUPS, arguments, grid, 4, arrays=arrays)


def _counts(tables: Sequence[TableLookups]) -> tuple[int, ...]:
    return _filled([int(each.indices.shape[0]) for each in tables])


def _begins(tables: Sequence[TableLookups]) -> tuple[int, ...]:
    begins = accumulate([each.indices.shape[0] for each in tables], initial=0)
    return _filled(list(begins)[: len(tables)])


# ---- segments


def find_segments(lookups: SortedLookups, targets: Sequence[Target], arrays: Arrays) -> Segments:
    """Enqueue the kernel that finds the lookups of each row, on the current stream.

    Args:
        lookups: one at least; at most as many as `list_lookups` takes.
        targets: MOST_TABLES at most, with rising `first`, all of one dtype and number of columns.
        arrays: the array library.

    Raises:
        EngineError: the kernel is not in the pack and cannot be compiled.
    """
    total, weighted = int(lookups.keys.shape[0]), lookups.factors is not None
    tiles = _grid(total, _TILE)
    found = Segments(
        lookups,
        tuple(targets),
        starts=arrays.empty(tiles * _TILE, "int32"),
        counts=arrays.empty(tiles, "int32"),
        bags=arrays.empty(total, "int32"),
        factors=arrays.empty(total if weighted else 1, "float32"),
        places=arrays.empty(tiles * _TILE, "int64"),
        squares_at=arrays.empty(tiles * _TILE, "int64"),
        arrays=arrays,
    )
    item = item_bytes(targets[0].rows)
    key = (
        "find", weighted, tiles,
        *[(stride(each.rows, 0) * item, each.first) for each in targets],
    )  # fmt: skip
    numbers = {
        **{f"tables.{i}": place for i, place in enumerate(_tables(targets))},
        **{f"accumulators.{i}": place for i, place in enumerate(_accumulators(targets))},
        "total": total,
    }
    pointers = [
        lookups.keys, lookups.order, lookups.bags, lookups.factors if weighted else found.factors,
        found.starts, found.counts, found.bags, found.factors, found.places, found.squares_at,
    ]  # fmt: skip
    loading.repeated(key, partial(find_launch, found), pointers, numbers, arrays)()
    return found


def find_launch(segments: Segments) -> Launch:
    """Return the launch of `find_segments`."""
    lookups, targets = segments.lookups, segments.targets
    weighted = lookups.factors is not None
    item = item_bytes(targets[0].rows)
    arguments = {
        "keys": lookups.keys, "order": lookups.order, "bags": lookups.bags,
        "factors": lookups.factors if weighted else segments.factors,
        "starts": segments.starts, "counts": segments.counts, "sorted_bags": segments.bags,
        "sorted_factors": segments.factors, "places": segments.places,
        "squares_at": segments.squares_at,
        "tables": _tables(targets),
        "pitches": _filled([stride(each.rows, 0) * item for each in targets]),
        "firsts": _filled([each.first for each in targets]),
        "accumulators": _accumulators(targets),
        "total": segments.total, "TILE": _TILE, "WEIGHTED": weighted,
    }  # fmt: skip
    grid = (int(segments.counts.shape[0]),)
    return Launch(FIND_SEGMENTS, arguments, grid, _WARPS, arrays=segments.arrays)


def _tables(targets: Sequence[Target]) -> tuple[int, ...]:
    return _filled([address(each.rows) for each in targets])


def _accumulators(targets: Sequence[Target]) -> tuple[int, ...]:
    given = [each.accumulators for each in targets]
    return _filled([0 if each is None else address(each) for each in given])


# ---- updates


def update(
    segments: Segments, gradients: Any, kind: int, rate: float | Any = 0.0, epsilon: float = 0.0
) -> Callable[[], None]:
    """Return a function that enqueues the update of all rows that were looked up.

    Args:
        segments: from `find_segments`.
        gradients: [bags, dim] in the dtype of the tables, unit stride along rows.
        kind: STORE: a row becomes the sum of its gradients; SGD: rate x sum is subtracted from it;
            ADAGRAD: see `ficco.FusedRowWiseAdagrad`.
        rate: the learning rate: a number, or float32 [1] on the device.
        epsilon: of Adagrad.

    Raises:
        EngineError: a kernel is not in the pack and cannot be compiled.
    """
    launches = partial(update_launches, segments, gradients, kind, rate, epsilon)
    dim, arrays = gradients.shape[1], segments.arrays
    tiles = int(segments.counts.shape[0])
    aligned, by_address = _aligned(segments, gradients), not isinstance(rate, (int, float))
    carry = arrays.empty(2 * tiles * dim, "float32")
    at = rate if by_address else segments.factors
    rate_bits = 0 if by_address else _bits(rate)
    numbers = {"total": segments.total, "rate_bits": rate_bits}
    key = (
        "update", dtype_name(gradients), tiles, dim, stride(gradients, 0), kind, by_address,
        _bits(epsilon), aligned, segments.lookups.factors is not None,
    )  # fmt: skip
    own = [
        gradients, gradients, segments.lookups.keys, segments.starts, segments.counts,
        segments.bags, segments.factors, segments.places, segments.squares_at, carry, at,
    ]  # fmt: skip
    within = loading.repeated(key, lambda: launches(carry)[0], own, numbers, arrays)
    split = [
        gradients, segments.lookups.keys, segments.counts, segments.places, segments.squares_at,
        carry, at,
    ]  # fmt: skip
    across = loading.repeated(("split", key), lambda: launches(carry)[1], split, numbers, arrays)

    def enqueue(*_: Any) -> None:
        within()
        across()

    return partial(enqueue, segments, gradients, carry, at)  # which must live until then


def update_launches(
    segments: Segments, gradients: Any, kind: int, rate: float | Any, epsilon: float, carry: Any
) -> tuple[Launch, Launch]:
    """Return the launches of `update`, in order, with memory for the parts of segments."""
    dim, item = gradients.shape[1], item_bytes(gradients)
    edge, tiles = ALIGN // item, int(segments.counts.shape[0])
    by_address, aligned = not isinstance(rate, (int, float)), _aligned(segments, gradients)
    cols = max(min(power(dim), _MOST_COLS), _LEAST_COLS)
    common = {
        "table": gradients, "keys": segments.lookups.keys, "counts": segments.counts,
        "places": segments.places, "squares_at": segments.squares_at, "carry": carry,
        "rate": rate if by_address else segments.factors,
        "total": segments.total, "dim": dim, "kind": kind, "has_rate": int(by_address),
        "rate_bits": 0 if by_address else _bits(rate), "epsilon_bits": _bits(epsilon),
        "TILE": _TILE,
    }  # fmt: skip
    own = common | {
        "gradients": gradients, "starts": segments.starts, "sorted_bags": segments.bags,
        "sorted_factors": segments.factors, "stride": stride(gradients, 0),
        "BAGS": max(min(_THREADS * edge // cols, _MOST_BAGS), 1), "COLS": cols,
        "LOOKUPS": _LOOKUPS, "EDGE": edge if aligned else 1, "BYTES": ALIGN if aligned else item,
        "WEIGHTED": segments.lookups.factors is not None,
    }  # fmt: skip
    arrays = segments.arrays
    return (
        Launch(UPDATE_ROWS, own, (tiles,), _WARPS, odd=True, arrays=arrays),
        Launch(
            UPDATE_SPLIT_ROWS, common | {"COLS": _SPLIT_COLS}, (tiles,), _WARPS, odd=True,
            arrays=arrays,
        ),
    )  # fmt: skip


def _aligned(segments: Segments, gradients: Any) -> bool:
    """Return whether 16 bytes divide the rows of gradients and tables, and their addresses."""
    item, matrices = item_bytes(gradients), [gradients, *[each.rows for each in segments.targets]]
    return gradients.shape[1] * item % ALIGN == 0 and all(
        address(each) % ALIGN == 0 and stride(each, 0) * item % ALIGN == 0 for each in matrices
    )


def _grid(lookups: int, tile: int) -> int:
    """Return the number of programs for so many lookups."""
    tiles = -(-lookups // tile)
    step = max(power(tiles) // _STEPS, _STEP) if tiles > _STEP else 1
    return -(-tiles // step) * step


def _bits(number: float) -> int:
    """Return the bits of a float32 as a number of 32 bits."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def _filled(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the values, and the last one again up to one of the lengths of compiled kernels."""
    length = next(length for length in _LENGTHS if len(values) <= length)
    return (*values, *[values[-1]] * (length - len(values)))
