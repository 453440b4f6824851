"""One launch that pools the bags of all tables of a rank, and stores peers' bags in their windows.

It is used like `one_kernel_gather`:

    prepared = prepare(table, places, device)       # once per plan and window
    warm(prepared, operands, control)               # before any stream waits or is captured
    pool_and_push(prepared, operands, control, copy)    # every call

If a peer's signal does not arrive, dependent results become NaN, a status word reports it, and the
launch ends. Launches of one `PoolAndPush` must not overlap. The values of indices and offsets are
not checked: they are in device memory, and reading them would wait for the device.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from ficco.dtypes import ELEMENT_BYTES
from ficco.kernels import loading
from ficco.kernels.arrays import Arrays, item_bytes, library_of, stride
from ficco.kernels.declarations import POOL_AND_PUSH
from ficco.kernels.one_kernel import (
    ALIGN,
    Control,
    Places,
    check_operand,
    check_rows,
    power,
    ranks_as_bits,
    signed,
)
from ficco.kernels.table_operands import TableOperands, check_tables, tuples_of
from ficco.kernels.variants import Launch
from ficco.lowering.cutting import chunk_bounds
from ficco.plan import SIGNALS
from ficco.tables import GATES, MOVES, PoolTable

__all__ = [
    "PoolAndPush", "launch_of", "pool_and_push", "prepare", "warm",
]  # fmt: skip

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


class PoolAndPush(NamedTuple):
    """A table prepared for launches, returned by `prepare`. It must outlive their graphs.

    Attributes:
        table: the table.
        bags, cols: bags and columns of a block.
        blocks: blocks of an item.
        places, jobs: the kernel's tables, on the device.
        counts, gates: zeros between launches.
        copy_places: entries of one window copy in `places`.
        job_count: number of jobs.
        items: blocks, and groups of rows to copy.
        leaving: jobs, items and programs that use the gates; see the kernel.
        arrays: the array library for the device.
    """

    table: PoolTable
    bags: int
    cols: int
    blocks: int
    places: Any
    jobs: Any
    counts: Any
    gates: Any
    copy_places: int
    job_count: int
    items: int
    leaving: int
    arrays: Arrays


def prepare(table: PoolTable, places: Places, device: Any) -> PoolAndPush:
    """Prepare a table for launches; it copies to the device, so no stream may wait meanwhile.

    Args:
        table: table of this rank's plan.
        places: the window that calls use.
        device: an array library (`Arrays`), or a torch.device.
    """
    arrays = library_of(device)
    item = ELEMENT_BYTES[table.dtype]
    cols = max(min(power(table.dim), _MOST_COLS), _LEAST_COLS)
    bags = max(min(_THREADS * (ALIGN // item) // cols, _MOST_BAGS), 1)
    made = sum([sent.rows for sent in table.sent]) + table.rows
    every = -(-made // bags) * table.tables * -(-table.dim // cols)
    blocks = max(min(every // ((arrays.processors or 1) * _ITEMS), _MOST_BLOCKS), 1)
    jobs, leaving = _jobs(table, (bags, cols, blocks), (_MOVE_ROWS, _MOVE_BYTES // item))
    numbers = [
        [*words, *(base + table.recv for base in data)]
        for words, data in zip(*places[:2], strict=True)
    ]
    return PoolAndPush(
        table=table,
        bags=bags,
        cols=cols,
        blocks=blocks,
        places=arrays.place(numbers, "int64"),
        jobs=arrays.place(jobs or [[0] * _FIELDS], "int32"),
        counts=arrays.place([0] * (table.world * SIGNALS["data"]), "int32"),
        gates=arrays.place([0] * GATES, "int32"),
        copy_places=len(numbers[0]),
        job_count=len(jobs),
        items=jobs[-1][1] if jobs else 0,
        leaving=leaving + 1,  # the door
        arrays=arrays,
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


def pool_and_push(
    prepared: PoolAndPush, operands: TableOperands, control: Control, copy: int
) -> None:
    """Enqueue one call on the current stream: one launch.

    Sums are float32, in the order of a bag's indices, and are rounded once; means after division.

    Args:
        prepared: the prepared table.
        operands: the operands of this call.
        control: digest, stop and status words, timeout.
        copy: the window copy, 0 or 1; all ranks use the same.

    Raises:
        InputError: the operands do not fit the table.
    """
    loading.enqueue(launch_of(prepared, operands, control, copy))


def launch_of(
    prepared: PoolAndPush, operands: TableOperands, control: Control, copy: int = 0
) -> Launch:
    """Return the launch of `pool_and_push`.

    Raises:
        InputError: the operands do not fit the table.
    """
    arguments = _arguments(prepared, operands, control, copy)
    dtypes = {} if operands.tables else {"indices": "int64", "offsets": "int64"}
    dtypes["weights"] = "float32"
    return Launch(
        POOL_AND_PUSH, arguments, (prepared.items + 1,), _WARPS, dtypes=dtypes, odd=True,
        arrays=prepared.arrays,
    )  # fmt: skip


def warm(prepared: PoolAndPush, operands: TableOperands, control: Control) -> None:
    """Compile and load the kernel of `pool_and_push` for such operands; pool and send nothing.

    Call it before a stream waits or is captured: loading a kernel later would wait for the stream.

    Raises:
        InputError: the operands do not fit the table.
    """
    launch = launch_of(prepared, operands, control)
    gates = prepared.arrays.place([0] * GATES, "int32")  # a call may be using the table's gates
    nothing = {"leaving": 1, "chunks": 0, "peers": 0, "sources": 0}
    loading.warm(launch._replace(grid=(1,)), {"gates": gates} | nothing)


def _arguments(
    prepared: PoolAndPush, operands: TableOperands, control: Control, copy: int
) -> dict[str, Any]:
    """Return the kernel's arguments by name."""
    table, y = prepared.table, operands.y
    _check(table, operands)
    window_stride = y.shape[1]
    sources = [received.source for received in table.received]
    return {
        "y": y,
        **tuples_of(operands, table.modes, (table.dim, window_stride)),
        "jobs": prepared.jobs,
        "counts": prepared.counts,
        "places": prepared.places,
        "gates": prepared.gates,
        "stop": control.stop,
        "status": control.status,
        "digest": signed(control.digest),
        "copy": copy,
        "copy_places": prepared.copy_places,
        "job_count": prepared.job_count,
        "blocks": prepared.blocks,
        "leaving": prepared.leaving,
        "dim": table.dim,
        "chunks": table.chunks,
        "rank": table.rank,
        "peers": ranks_as_bits([rank for rank in range(table.world) if rank != table.rank]),
        "sources": ranks_as_bits(sources),
        "y_stride": stride(y, 0),
        "window_stride": window_stride,
        "timeout_ns": control.timeout_ns,
        "WORLD": table.world,
        "JOBS": max(power(prepared.job_count), _LEAST_JOBS),
        "LOOKUPS": _LOOKUPS,
        "BAGS": prepared.bags,
        "COLS": prepared.cols,
        "MOVE_ROWS": _MOVE_ROWS,
        "MOVE_COLS": _MOVE_BYTES // item_bytes(y),
        "ON_GPU": prepared.arrays.on_gpu,
    }


def _check(table: PoolTable, operands: TableOperands) -> None:
    y = operands.y
    check_tables(operands, (table.dim,) * table.tables, table.modes, table.dtype)
    check_operand("y0", y, (table.rows, y.shape[1]), table.dtype)
    check_rows("y0", y)
