"""Sums and means of table rows, bag by bag, over several tables in one launch.

    pooled = prepare(dims, modes, dtype, device)    # once per set of sizes
    pool(pooled, operands, first)                   # every call

Sums are float32 and rounded once; means after division. A bag's rows are added in the order of its
indices, so the result depends neither on the grid nor on the tile. The values of indices and
offsets are not checked: they are in device memory, and reading them would wait for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ficco.core.dtypes import DTYPES, ELEMENT_BYTES
from ficco.core.errors import InputError
from ficco.kernels import loading
from ficco.kernels.arrays import Arrays, call_stride, dtype_name, library_of
from ficco.kernels.declarations import POOL_TABLES
from ficco.kernels.one_kernel import ALIGN, check_rows, power
from ficco.kernels.records import LaunchOf, Of, Record, Setting
from ficco.kernels.table_operands import TableOperands, assuming, check_tables, tuples_of
from ficco.kernels.variants import Launch
from ficco.plan import Region
from ficco.plan.tables import MOST_TABLES
from ficco.program import Pool

_LEAST_COLS, _MOST_COLS = 16, 256
_INDEX_COST = 64  # cost of a lookup's index and address in a panel, in bytes of the row
# Rows of each bag that a step adds, and warps of a program. Chosen on an H100 (bench/NOTES.md).
_LOOKUPS, _WARPS = 2, 2
_LANES = 32  # threads of a warp
_MOST_PROGRAMS = 1 << 20  # programs stride over the blocks
_MOST_BLOCKS = (1 << 31) - 1 - _MOST_PROGRAMS  # their numbers, and a stride beyond, are int32
_MOST_BAGS = 16  # Triton 3.6 fails to compile more, if programs have several warps


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
    """Sizes prepared for launches; returned by `prepare`. It must outlive the launches' graphs.

    Attributes:
        dims: columns of each table.
        modes: how each table is pooled, see `ficco.operators.problem.MODES`.
        columns: the target's first column of each table.
        dtype: of the tables.
        width: least number of columns of a target.
        tile: the block of a program.
        panels: descriptors of panels, on the device; None without columns. See the kernel.
        panel_count: number of panels: at most `tile.cols` columns of one table each.
        arrays: the array library.
    """

    dims: tuple[int, ...]
    modes: tuple[str, ...]
    columns: tuple[int, ...]
    dtype: str
    width: int
    tile: PoolingTile
    panels: Any
    panel_count: int
    arrays: Arrays


def prepare(
    dims: Sequence[int],
    modes: Sequence[str],
    dtype: str,
    device: Any,
    columns: Sequence[int] | None = None,
    tile: PoolingTile | None = None,
) -> Pooled:
    """Return sizes prepared for launches.

    It copies to the device, so it must not be called while a stream waits or is captured.

    Args:
        dims: columns of each of 1 to 32 tables.
        modes: per table "sum", "mean" or "weighted".
        dtype: of all tables.
        device: an array library (`Arrays`), or a torch.device.
        columns: the target's first column of each table; None: the tables are side by side.
        tile: the block of a program; None: `choose_tile`.

    Raises:
        InputError: the sizes do not fit together.
    """
    if not 1 <= len(dims) == len(modes) <= MOST_TABLES:
        raise InputError(
            f"{len(dims)} tables with {len(modes)} modes; one launch takes 1 to {MOST_TABLES} "
            "tables, and a mode for each"
        )
    columns = tuple([0, *accumulate(dims)][: len(dims)] if columns is None else columns)
    if len(columns) != len(dims) or min(columns) < 0:
        raise InputError(
            f"columns={list(columns)}: one column of 0 or more is needed for each of "
            f"{len(dims)} tables"
        )
    tile = tile or choose_tile(dims, columns, dtype)
    _check_tile(tile)
    arrays = library_of(device)
    panels = [
        panel
        for number, (dim, column) in enumerate(zip(dims, columns, strict=True))
        for panel in _panels(number, dim, column, tile.cols)
    ]
    placed = arrays.place(panels, "int32") if panels else None
    width = max(column + dim for column, dim in zip(columns, dims, strict=True))
    return Pooled(
        tuple(dims), tuple(modes), columns, dtype, width, tile, placed, len(panels), arrays
    )  # fmt: skip


def pool(pooled: Pooled, operands: TableOperands, first: int = 0) -> None:
    """Store the sums or means of some bags of all tables, on the current stream.

    Args:
        pooled: the sizes.
        operands: the tables; y [bags, columns] in the dtype of the result. Row i of y gets bag
            `first` + i of all tables. Columns of no table are not written.
        first: the first bag.

    Raises:
        InputError: there are no such bags, or the operands do not fit.
    """
    launch = launch_of(pooled, operands, first)
    if launch is not None:
        loading.enqueue(launch)


def launch_of(pooled: Pooled, operands: TableOperands, first: int = 0) -> Launch | None:
    """Return the launch of `pool`, or None if nothing is stored.

    Raises:
        InputError: there are no such bags, or the operands do not fit.
    """
    y, tile = operands.y, pooled.tile
    check_tables(operands, pooled.dims, pooled.modes, pooled.dtype)
    _check_target(pooled, operands, first)
    bags = y.shape[0]
    if not bags or not pooled.panel_count:
        return None
    arguments = {
        "target": y,
        **tuples_of(operands, pooled.modes, (*pooled.dims, *pooled.columns)),
        "panels": pooled.panels, "panel_count": pooled.panel_count,
        "first": first, "bags": bags, "target_stride": call_stride(y),
        "LOOKUPS": tile.lookups, "BAGS": tile.bags, "COLS": tile.cols,
    }  # fmt: skip
    blocks = -(-bags // tile.bags) * pooled.panel_count
    if blocks > _MOST_BLOCKS:
        raise InputError(f"{blocks} blocks of bags; one launch has at most {_MOST_BLOCKS}")
    programs = min(blocks, _MOST_PROGRAMS)
    if tile.programs and pooled.arrays.processors:
        programs = min(programs, tile.programs * pooled.arrays.processors)
    return assuming(
        Launch(
            POOL_TABLES, arguments, (programs,), tile.warps, dtypes={"weights": "float32"},
            arrays=pooled.arrays,
        )
    )  # fmt: skip


def _operands(work: Pool, of: Of, matrices: Mapping[str, Region]) -> dict[str, Any]:
    """Return a launch's operands; offsets are whole, since bags end at the next."""
    found = {"y0": of(work.target)}
    for i, bag in enumerate(work.bags):
        found |= {
            f"table{i}": of(bag.table),
            f"indices{i}": of(bag.indices),
            f"offsets{i}": of(matrices[bag.bags.buffer]),
            f"weights{i}": None if bag.weights is None else of(bag.weights),
        }
    return found


def _prepare(work: Pool, setting: Setting) -> LaunchOf:
    dims, modes, columns = work.sizes
    dtype = setting.buffers[work.bags[0].table.buffer].dtype
    key = repr((work.sizes, dtype))
    if key not in setting.shared:
        setting.shared[key] = prepare(dims, modes, dtype, setting.arrays, columns)
    pooled: Pooled = setting.shared[key]
    first = work.bags[0].bags.col0
    return lambda operands, _: launch_of(pooled, TableOperands.of(operands, len(dims)), first)


RECORD = Record((POOL_TABLES,), _operands, _prepare, {"bags": 0})


def choose_tile(dims: Sequence[int], columns: Sequence[int], dtype: str) -> PoolingTile:
    """Return the block of a program for tables with about as many lookups each.

    The columns cost least over all lookups, where a wider block leaves threads without columns,
    and a narrower one reads each index more often. Each thread loads 16 bytes of a row at a time
    if 16 bytes divide all bounds.
    """
    item = ELEMENT_BYTES[dtype]
    costs: dict[int, int] = {}
    cols = _MOST_COLS
    while cols >= _LEAST_COLS:
        costs[cols] = sum(-(-dim // cols) for dim in dims) * (cols * item + _INDEX_COST)
        cols //= 2
    cols = min(costs, key=costs.__getitem__)
    wide = all(number * item % ALIGN == 0 for number in (*dims, *columns))
    edge = ALIGN // item if wide else 1
    threads = min(_LANES * _WARPS, _MOST_BAGS * cols // edge)
    bags = max(threads * edge // cols, 1)
    return PoolingTile(_LOOKUPS, bags, cols, threads // _LANES)


def _panels(number: int, dim: int, column: int, cols: int) -> list[list[int]]:
    """Return the descriptors of a table's panels, with the fields that the kernel reads."""
    return [
        [number, begin, min(cols, dim - begin), column + begin] for begin in range(0, dim, cols)
    ]


# ---- checks


def _check_tile(tile: PoolingTile) -> None:
    sizes = {"lookups": tile.lookups, "bags": tile.bags, "cols": tile.cols, "warps": tile.warps}
    for name, size in sizes.items():
        if size < 1 or (name != "lookups" and size != power(size)):
            wanted = "1 or more" if name == "lookups" else "a power of two"
            raise InputError(f"tile: {name}={size}; give {wanted}")
    if tile.bags > _MOST_BAGS:
        raise InputError(f"tile: bags={tile.bags}; {_MOST_BAGS} is the most")


def _check_target(pooled: Pooled, operands: TableOperands, first: int) -> None:
    y, batch = operands.y, operands.offsets[0].shape[1]
    if len(y.shape) != 2 or y.shape[1] < pooled.width:
        raise InputError(f"y is {list(y.shape)}; give {pooled.width} columns or more")
    if dtype_name(y) not in DTYPES:
        raise InputError(f"y holds {y.dtype}; give one of {', '.join(DTYPES)}")
    check_rows("y", y)
    if not 0 <= first <= first + y.shape[0] <= batch:
        raise InputError(
            f"bags {first} to {first + y.shape[0]}: give a range of the {batch} bags of each table"
        )
