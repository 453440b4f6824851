"""Sums and means of table rows, bag by bag, over all tables of a rank in one launch.

    pooled = prepare(tables)                        # once per set of tables, indices and offsets
    warm(pooled, target)                            # before any stream waits or is captured
    pool(pooled, (first, last), target)             # every call

Sums are float32 and rounded once. A bag's rows are added in the order of its indices, so the result
depends neither on the grid nor on the tile. The values of indices and offsets are not checked:
they are in device memory, and reading them would wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ficco.dtypes import DTYPES
from ficco.errors import InputError
from ficco.kernels import loading
from ficco.kernels.arrays import Arrays, address, dtype_name, item_bytes, library_of, stride
from ficco.kernels.declarations import POOL_TABLES
from ficco.kernels.one_kernel import ALIGN, check_rows, power
from ficco.kernels.variants import Launch

__all__ = ["Pooled", "PooledTable", "PoolingTile", "choose_tile", "launch_of", "pool", "prepare",
           "warm"]  # fmt: skip

_INDEX_DTYPES = ("int32", "int64")
_LEAST_COLS, _MOST_COLS = 16, 256
_INT32_MAX = (1 << 31) - 1
_INDEX_COST = 64  # cost of a lookup's index and address in a panel, in bytes of the row
# Rows of each bag that a step adds, and warps of a program. Chosen on an H100 (bench/NOTES.md).
_LOOKUPS, _WARPS = 2, 2
_LANES = 32  # threads of a warp
_MOST_BAGS = 16  # Triton 3.6 fails to compile more, if programs have several warps


class PooledTable(NamedTuple):
    """A table with the bags to pool from it.

    Attributes:
        table: [rows, dim], unit stride along rows; rows and row stride below 2^31.
        indices: [lookups], the rows of all bags, one bag after the other.
        offsets: [batch], the first lookup of each bag, where the last bag ends with `indices`; or
            [batch + 1] with `include_last_offset`, where the last entry is the end of the last bag.
        weights: [lookups], a factor per lookup; None: all are 1.
        mean: whether to divide each sum by the bag's number of lookups. An empty bag has mean 0.
    """

    table: Any
    indices: Any
    offsets: Any
    weights: Any = None
    mean: bool = False


class PoolingTile(NamedTuple):
    """The block of sums that a program computes at a time.

    Attributes:
        lookups: rows of each bag that a step adds while it loads as many for the next step.
        bags: bags of a block, a power of two, 16 at most.
        cols: columns of a block, a power of two.
        warps: warps of a program.
        programs: programs per multiprocessor at most; 0: a program for each block.
    """

    lookups: int
    bags: int
    cols: int
    warps: int
    programs: int = 0


class Pooled(NamedTuple):
    """Tables prepared for launches; returned by `prepare`. It must outlive the launches' graphs.

    Attributes:
        tables: the tables.
        batch: number of bags of each table.
        columns: the target's first column of each table.
        width: least number of columns of a target.
        tile: the block of a program.
        panels: descriptors of panels, on the device; None without columns. See the kernel.
        panel_count: number of panels: at most `tile.cols` columns of one table each.
        edge: number of elements that divides the strides and bounds of all panels.
        dtype: dtype of the tables.
        weighted: the array whose dtype is that of all weights; None without weights.
        arrays: the array library.
    """

    tables: tuple[PooledTable, ...]
    batch: int
    columns: tuple[int, ...]
    width: int
    tile: PoolingTile
    panels: Any
    panel_count: int
    edge: int
    dtype: str
    weighted: Any
    arrays: Arrays


def prepare(
    tables: Sequence[PooledTable],
    include_last_offset: bool = False,
    columns: Sequence[int] | None = None,
    tile: PoolingTile | None = None,
    arrays: Arrays | None = None,
) -> Pooled:
    """Return tables prepared for launches.

    It copies to the device, so it must not be called while a stream waits or is captured.

    Args:
        tables: one or more, of one dtype. All indices and offsets have one dtype, int32 or int64,
            and all weights have one dtype.
        include_last_offset: see `PooledTable.offsets`.
        columns: the target's first column of each table; None: the tables are side by side.
        tile: the block of a program; None: `choose_tile`.
        arrays: the array library; None: PyTorch.

    Raises:
        InputError: a table does not fit, or the tables do not fit together.
    """
    _check(tables, columns)
    batch = _batch(tables, include_last_offset)
    dims = [each.table.shape[1] for each in tables]
    columns = tuple([0, *accumulate(dims)][: len(dims)] if columns is None else columns)
    edge = _edge(tables, columns)
    tile = tile or choose_tile(tables, edge)
    _check_tile(tile)
    arrays = arrays or library_of(tables[0].table.device)
    panels = [
        panel
        for each, column in zip(tables, columns, strict=True)
        for panel in _panels(each, column, tile.cols)
    ]
    placed = arrays.place(panels, "int64") if panels else None
    width = max(column + dim for column, dim in zip(columns, dims, strict=True))
    return Pooled(
        tuple(tables), batch, columns, width, tile, placed, len(panels), edge,
        dtype_name(tables[0].table), _weights(tables), arrays,
    )  # fmt: skip


def pool(pooled: Pooled, bags: tuple[int, int], target: Any) -> None:
    """Store the sums or means of some bags of all tables, on the current stream.

    Args:
        pooled: the tables.
        bags: the first bag, and the one past the last.
        target: [bags, columns], unit stride along rows, in the dtype of the result. Row i has bag
            bags[0] + i of all tables; columns of no table are not written.

    Raises:
        InputError: there are no such bags, or the target does not fit.
    """
    _check_target(pooled, bags, target)
    if bags[1] > bags[0] and pooled.panel_count:
        loading.enqueue(launch_of(pooled, bags, target))


def warm(pooled: Pooled, target: Any) -> None:
    """Load the kernel of `pool` for such a target; nothing is stored.

    Raises:
        InputError: the target does not fit.
    """
    _check_target(pooled, (0, 0), target)
    if pooled.panel_count:
        loading.warm(launch_of(pooled, (0, 1), target), {"bags": 0})


def launch_of(pooled: Pooled, bags: tuple[int, int], target: Any) -> Launch:
    """Return the launch of `pool`; there must be a bag and a panel."""
    (first, last), tile, one = bags, pooled.tile, pooled.tables[0]
    aligned = pooled.edge > 1 and _divides(
        ALIGN, address(target), stride(target, 0) * item_bytes(target)
    ) and _divides(pooled.edge, stride(target, 0))  # fmt: skip
    arguments = {
        "target": target, "table": one.table, "indices": one.indices,
        "weights": target if pooled.weighted is None else pooled.weighted,
        "panels": pooled.panels, "panel_count": pooled.panel_count,
        "first": first, "bags": last - first, "target_stride": stride(target, 0),
        "LOOKUPS": tile.lookups, "BAGS": tile.bags, "COLS": tile.cols,
        "EDGE": pooled.edge if aligned else 1,
        "BYTES": ALIGN if aligned else item_bytes(pooled.dtype),
        "WEIGHTED": pooled.weighted is not None,
    }  # fmt: skip
    dtypes = {"weights": "float32"} if pooled.weighted is None else {}
    programs = -(-(last - first) // tile.bags) * pooled.panel_count
    if tile.programs and pooled.arrays.processors:
        programs = min(programs, tile.programs * pooled.arrays.processors)
    return Launch(
        POOL_TABLES, arguments, (programs,), tile.warps, dtypes=dtypes, arrays=pooled.arrays
    )


def choose_tile(tables: Sequence[PooledTable], edge: int) -> PoolingTile:
    """Return the block of a program for these tables.

    The columns cost least over all lookups, where a wider block leaves threads without columns,
    and a narrower one reads each index more often. Each thread loads 16 bytes of a row at a time
    if `edge`, the number of elements that divides all bounds, allows it.
    """
    item = item_bytes(tables[0].table)
    costs: dict[int, int] = {}
    cols = _MOST_COLS
    while cols >= _LEAST_COLS:
        reads = sum(
            -(-each.table.shape[1] // cols) * (each.indices.shape[0] + 1) for each in tables
        )
        costs[cols] = reads * (cols * item + _INDEX_COST)
        cols //= 2
    cols = min(costs, key=costs.__getitem__)
    threads = min(_LANES * _WARPS, _MOST_BAGS * cols // edge)
    bags = max(threads * edge // cols, 1)
    return PoolingTile(_LOOKUPS, bags, cols, threads // _LANES)


def _panels(of: PooledTable, column: int, cols: int) -> list[list[int]]:
    """Return the descriptors of a table's panels, with the fields that the kernel reads."""
    table, weights = of.table, 0 if of.weights is None else address(of.weights)
    return [
        [
            address(table) + begin * item_bytes(table), stride(table, 0),
            min(cols, table.shape[1] - begin), column + begin, address(of.indices),
            address(of.offsets), of.offsets.shape[0], of.indices.shape[0], weights, int(of.mean),
        ]
        for begin in range(0, table.shape[1], cols)
    ]  # fmt: skip


def _edge(tables: Sequence[PooledTable], columns: Sequence[int]) -> int:
    """Return the elements of 16 bytes if they divide all panels and addresses, else 1."""
    edge = ALIGN // item_bytes(tables[0].table)
    aligned = all(
        _divides(edge, stride(each.table, 0), each.table.shape[1], column)
        and _divides(ALIGN, address(each.table))
        for each, column in zip(tables, columns, strict=True)
    )
    return edge if aligned else 1


def _divides(divisor: int, *numbers: int) -> bool:
    return all(number % divisor == 0 for number in numbers)


# ---- checks


def _check(tables: Sequence[PooledTable], columns: Sequence[int] | None) -> None:
    if not tables:
        raise InputError("no tables were given; give one or more")
    first = tables[0]
    for i, each in enumerate(tables):
        if len(each.table.shape) != 2:
            raise InputError(f"tables[{i}].table is {list(each.table.shape)}; give [rows, dim]")
        check_rows(f"tables[{i}].table", each.table)
        rows, distance = each.table.shape[0], stride(each.table, 0)
        if max(rows, distance) > _INT32_MAX:
            raise InputError(
                f"tables[{i}].table has {rows} rows, {distance} elements apart; both numbers may "
                f"be at most {_INT32_MAX}"
            )
        _check_dtype(f"tables[{i}].table", each.table, tuple(DTYPES), first.table)
        _check_row(f"tables[{i}].indices", each.indices, None)
        _check_row(f"tables[{i}].offsets", each.offsets, None)
        _check_dtype(f"tables[{i}].indices", each.indices, _INDEX_DTYPES, first.indices)
        _check_dtype(f"tables[{i}].offsets", each.offsets, _INDEX_DTYPES, first.indices)
        if each.weights is None:
            continue
        if each.mean:
            raise InputError(f"tables[{i}] has weights and mean=True; weights are for sums only")
        _check_row(f"tables[{i}].weights", each.weights, each.indices.shape[0])
        _check_dtype(f"tables[{i}].weights", each.weights, tuple(DTYPES), _weights(tables))
    if columns is not None and (len(columns) != len(tables) or min(columns) < 0):
        raise InputError(
            f"columns={list(columns)}: one column of 0 or more is needed for each of "
            f"{len(tables)} tables"
        )


def _weights(tables: Sequence[PooledTable]) -> Any:
    return next((each.weights for each in tables if each.weights is not None), None)


def _check_dtype(name: str, array: Any, allowed: tuple[str, ...], like: Any) -> None:
    if dtype_name(array) not in allowed:
        raise InputError(f"{name} holds {array.dtype}; give one of {', '.join(allowed)}")
    if dtype_name(array) != dtype_name(like):
        raise InputError(
            f"{name} holds {array.dtype}, an array before it {like.dtype}; one launch needs tables "
            "of one dtype, indices and offsets of one dtype, and weights of one dtype"
        )


def _check_row(name: str, array: Any, length: int | None) -> None:
    if len(array.shape) != 1 or (array.shape[0] > 1 and stride(array, 0) != 1):
        raise InputError(f"{name} is {list(array.shape)}; give one dimension of adjacent elements")
    if length is not None and array.shape[0] != length:
        raise InputError(f"{name} has {array.shape[0]} entries; give {length}, one per index")


def _batch(tables: Sequence[PooledTable], include_last_offset: bool) -> int:
    """Return the number of bags of each table.

    Raises:
        InputError: the tables have different numbers of bags.
    """
    counts = [each.offsets.shape[0] for each in tables]
    for i, count in enumerate(counts):
        if count != counts[0]:
            raise InputError(
                f"tables[{i}].offsets has {count} entries, tables[0].offsets {counts[0]}; all "
                "tables need the same number of bags"
            )
    if include_last_offset and not counts[0]:
        raise InputError(
            "tables[0].offsets has no entries; with include_last_offset there is one more entry "
            "than bags"
        )
    return int(counts[0]) - int(include_last_offset)


def _check_tile(tile: PoolingTile) -> None:
    sizes = {"lookups": tile.lookups, "bags": tile.bags, "cols": tile.cols, "warps": tile.warps}
    for name, size in sizes.items():
        if size < 1 or (name != "lookups" and size != power(size)):
            wanted = "1 or more" if name == "lookups" else "a power of two"
            raise InputError(f"tile: {name}={size}; give {wanted}")
    if tile.bags > _MOST_BAGS:
        raise InputError(f"tile: bags={tile.bags}; {_MOST_BAGS} is the most")


def _check_target(pooled: Pooled, bags: tuple[int, int], target: Any) -> None:
    first, last = bags
    if not 0 <= first <= last <= pooled.batch:
        raise InputError(f"bags={bags}: give a range of the {pooled.batch} bags of each table")
    if len(target.shape) != 2 or target.shape[0] < last - first or target.shape[1] < pooled.width:
        raise InputError(
            f"target is {list(target.shape)}; give {last - first} rows or more and "
            f"{pooled.width} columns or more"
        )
    if dtype_name(target) not in DTYPES:
        raise InputError(f"target holds {target.dtype}; give one of {', '.join(DTYPES)}")
    check_rows("target", target)
