"""One launch that pools the bags of all tables of a rank, and stores peers' bags in their windows.

Sums are float32, in the order of a bag's indices, and are rounded once; means after division. The
values of indices and offsets are not checked: they are in device memory, and reading them would
wait for the device.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from ficco.core.dtypes import ELEMENT_BYTES
from ficco.kernels.arrays import Arrays, call_stride
from ficco.kernels.declarations import POOL_AND_PUSH
from ficco.kernels.one_kernel import (
    ALIGN,
    Prepared,
    check_operand,
    check_rows,
    peers_of,
    power,
    ranks_as_bits,
    record_of,
)
from ficco.kernels.records import Operands, Places
from ficco.kernels.table_operands import TableOperands, assuming, check_tables, tuples_of
from ficco.lowering.cutting import chunk_bounds
from ficco.plan import SIGNALS
from ficco.plan.tables import GATES, MOVES, PoolTable

# The handshake needs 64 threads. `_LOOKUPS`, the sizes of copies and `_MOST_BLOCKS` were chosen on
# H100s (bench/NOTES.md).
_WARPS, _THREADS = 2, 64
_LOOKUPS = 2  # rows of each bag that a step adds
_LEAST_COLS, _MOST_COLS, _MOST_BAGS = 16, 256, 16
_MOVE_ROWS, _MOVE_BYTES = 4, 1024  # rows that a program copies at a time, and bytes of each
_ITEMS, _MOST_BLOCKS = 24, 4  # items for each multiprocessor, if there are enough blocks
_LEAST_JOBS = 64
_SEND, _OWN, _COPY = range(3)  # kinds of jobs
_FIELDS = 10  # of a job; see the kernel


def prepare(table: PoolTable, places: Places, arrays: Arrays) -> Prepared:
    """Prepare a table for launches on a window."""
    item = ELEMENT_BYTES[table.dtype]
    cols = max(min(power(table.dim), _MOST_COLS), _LEAST_COLS)  # of a block, like bags
    bags = max(min(_THREADS * (ALIGN // item) // cols, _MOST_BAGS), 1)
    made = sum([sent.rows for sent in table.sent]) + table.rows
    every = -(-made // bags) * table.tables * -(-table.dim // cols)
    blocks = max(min(every // ((arrays.processors or 1) * _ITEMS), _MOST_BLOCKS), 1)  # of an item
    jobs, leaving = _jobs(table, (bags, cols, blocks), (_MOVE_ROWS, _MOVE_BYTES // item))
    numbers = [
        [*words, *(base + table.recv for base in data)]
        for words, data in zip(*places[:2], strict=True)
    ]
    fixed = {
        "jobs": arrays.place(jobs or [[0] * _FIELDS], "int32"),
        "counts": arrays.place([0] * (table.world * SIGNALS["data"]), "int32"),
        "places": arrays.place(numbers, "int64"),
        "gates": arrays.place([0] * GATES, "int32"),
        # One more leaves than `_jobs` says: the door.
        "plan": (len(numbers[0]), len(jobs), blocks, leaving + 1, table.dim, table.chunks),
        "sets": (peers_of(table), ranks_as_bits([each.source for each in table.received])),
        "JOBS": max(power(len(jobs)), _LEAST_JOBS),
        "LOOKUPS": _LOOKUPS,
        "BAGS": bags,
        "COLS": cols,
        "MOVE_ROWS": _MOVE_ROWS,
        "MOVE_COLS": _MOVE_BYTES // item,
    }
    programs = (jobs[-1][1] if jobs else 0) + 1
    dtypes = {} if table.tables else {"indices": "int64", "offsets": "int64"}
    dtypes["weights"] = "float32"
    return Prepared(
        POOL_AND_PUSH, table, _arguments, fixed, programs, _WARPS, arrays, dtypes, finish=assuming
    )


def _jobs(
    table: PoolTable, block: tuple[int, int, int], moved: tuple[int, int]
) -> tuple[list[list[int]], int]:
    """Return the kernel's jobs, and the number of those for peers and of items that copy.

    Args:
        table: of the plan.
        block: bags and columns of a block, and blocks of an item.
        moved: rows and columns that a program copies at a time.
    """
    bags, cols, blocks = block
    jobs: list[list[int]] = []
    width, across = table.tables * table.dim, table.tables * -(-table.dim // cols)
    leaving = 0

    def add(items: int, kind: int, *fields: int) -> None:
        begin = jobs[-1][1] if jobs else 0
        jobs.append([begin, begin + items, kind, *fields])

    def pooled(rows: int) -> int:
        return -(-(-(-rows // bags) * across) // blocks)

    bounds = [chunk_bounds(sent.rows, table.chunks, "none") for sent in table.sent]
    for chunk in range(table.chunks):
        for (peer, bag, _), edges in zip(table.sent, bounds, strict=True):
            begin, end = edges[chunk : chunk + 2]
            if begin < end:
                about = (peer, bag + begin, end - begin, begin, table.left, width, chunk)
                add(pooled(end - begin), _SEND, *about)
                leaving += 1
    if table.rows and width:
        about = (table.rank, table.bag, table.rows, 0, table.left, width, 0)
        add(pooled(table.rows), _OWN, *about)
    for chunk, (begin, end) in enumerate(pairwise(chunk_bounds(table.rows, table.chunks, "none"))):
        for source, left, columns in table.received if begin < end else ():
            items = -(-(end - begin) // (moved[0] * MOVES)) * -(-columns // moved[1])
            add(items, _COPY, source, 0, end - begin, begin, left, columns, chunk)
            leaving += items
    return jobs, leaving


def _arguments(prepared: Prepared, operands: Operands) -> dict[str, Any]:
    """Return the arguments that depend on the operands, see `TableOperands.of`."""
    table: PoolTable = prepared.table
    tables, y = TableOperands.of(operands, table.tables), operands["y0"]
    check_tables(tables, (table.dim,) * table.tables, table.modes, table.dtype)
    check_operand("y0", y, (table.rows, y.shape[1]), table.dtype)
    check_rows("y0", y)
    window_stride = y.shape[1]
    return {
        "y": y,
        **tuples_of(tables, table.modes, (table.dim, window_stride)),
        "y_stride": call_stride(y),
        "window_stride": window_stride,
    }


_IDLE = {"plan": (0, 0, 1, 1, 1, 0), "sets": (0, 0)}
RECORD = record_of(POOL_AND_PUSH, prepare, _IDLE, {"gates": GATES})
