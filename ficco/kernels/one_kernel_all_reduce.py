"""One launch that multiplies, exchanges products by stores into mailboxes, and sums them.

It is for products of few rows, where the start of a copy engine and the signal of a stream take
longer than the data. Ranks synchronize within the launch, so nothing else is enqueued. For more
rows, a library computes the product in y before the launch (`OneKernelTable.made`).

    prepared = prepare(table, places, device)       # once per plan and mailbox
    warm(prepared, operands, control)               # before any stream waits or is captured
    all_reduce(prepared, operands, control)         # every call

If data do not arrive, dependent results become NaN, a status word reports it, and the launch ends.
Launches on one mailbox must not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ficco.dtypes import ELEMENT_BYTES
from ficco.kernels import loading
from ficco.kernels.arrays import Arrays, address, can_chain, item_bytes, library_of, stride, turned
from ficco.kernels.declarations import ALL_REDUCE
from ficco.kernels.one_kernel import (
    ALIGN,
    Control,
    Places,
    check_bias,
    check_operand,
    check_rows,
    power,
    ranks_as_bits,
    signed,
)
from ficco.kernels.variants import Launch
from ficco.tables import COUNTS, THREADS, OneKernelTable

__all__ = [
    "Control",
    "Launch",
    "OneKernel",
    "OneKernelTile",
    "Operands",
    "Places",
    "all_reduce",
    "launch_of",
    "prepare",
    "warm",
]

_SHARED = 140_000  # bytes that a program may use of a multiprocessor's 227 KiB
_WIDEST_SUM = 2048  # elements that a program sums at a time
_WIDEST_MOVE = 4096  # the same if the product is computed before the launch
_WIDEST_SENT = 8192  # elements that a program sends at a time in that case


class OneKernelTile(NamedTuple):
    """The tile of a program's multiplication.

    Attributes:
        rows, cols: size in y, powers of two; one row is multiplied without the matrix units.
        deep: depth of a step of k, a power of two.
        warps: 4 or 8; 16 if nothing is multiplied.
        stages: steps of k in flight.
    """

    rows: int
    cols: int
    deep: int
    warps: int
    stages: int


class OneKernel(NamedTuple):
    """A table prepared for launches, returned by `prepare`. It must outlive their graphs.

    Attributes:
        table: the table.
        tile: the tile of the multiplication.
        chunks, places: the kernel's tables, on the device.
        counts: words of the mailbox; see `ficco.kernels.mailbox`.
        copy_places: entries of one copy of the mailbox in `places`.
        programs: programs of a launch; an idle device runs all of them at the same time.
        aligned: whether rows and chunks begin and end at multiples of 16 bytes.
        chained: whether a launch may begin before the previous one has ended.
        arrays: the array library for the device.
    """

    table: OneKernelTable
    tile: OneKernelTile
    chunks: Any
    places: Any
    counts: Any
    copy_places: int
    programs: int
    aligned: bool
    chained: bool
    arrays: Arrays


class Operands(NamedTuple):
    """The operands of a call.

    Attributes:
        x: [m, k], unit stride along rows.
        w: [k, n], any strides.
        bias: [1, n] with adjacent elements, or None.
        y: [m, n], unit stride along rows; it holds x.w if a library computes that before.
    """

    x: Any
    w: Any
    bias: Any
    y: Any


def choose_tile(m: int, width: int, k: int, item: int) -> OneKernelTile:
    """Return the tile for m rows and a chunk of `width` columns, with elements of `item` bytes.

    Measured on H200 for chunks of 32, 64 and 128 columns: deep steps for few columns, and as many
    steps in flight as leave shared memory for another kernel.
    """
    cols = max(16, min(power(width), 128))
    depth = max(16, power(k))
    if m == 1:
        deep, warps = (512, 4) if cols <= 32 else (256, 8)
        return OneKernelTile(1, cols, max(64, min(depth, deep // item)), warps, 4)
    if item == 4:  # float32 is multiplied on the ordinary units, from registers
        return OneKernelTile(max(16, min(power(m), 32)), min(cols, 32), 32, 4, 3)
    rows = max(16, min(power(m), 128 if cols > 64 else 64))
    deep = 64 if cols > 64 else 256 if cols <= 32 and rows <= 32 else 128
    warps = 8 if cols > 64 and rows <= 64 else 4
    stages = max(2, min(4 if deep == 256 else 6, _SHARED // ((rows + cols) * deep * item)))
    return OneKernelTile(rows, cols, min(depth, deep), warps, stages)


def _moving_tile(m: int, width: int) -> OneKernelTile:
    """Return the tile for moving m rows of a chunk of a product that is computed already."""
    cols = max(16, min(power(width), 128))
    return OneKernelTile(min(power(m), _WIDEST_SENT // cols), cols, 16, 16, 1)


def prepare(
    table: OneKernelTable,
    places: Places,
    device: Any,
    tile: OneKernelTile | None = None,
) -> OneKernel:
    """Prepare a table for launches; it copies to the device, so no stream may wait meanwhile.

    Args:
        table: table of this rank's plan.
        places: the mailbox that calls use.
        device: an array library (`Arrays`), or a torch.device.
        tile: tile of the multiplication; by default `choose_tile` chooses it.
    """
    item = ELEMENT_BYTES[table.dtype]
    arrays = library_of(device)
    processors = arrays.processors or 1  # the interpreter runs one program after another
    width = max((chunk.end - chunk.begin for chunk in table.chunks), default=1)
    chosen = (
        _moving_tile(table.m, width) if table.made
        else choose_tile(table.m, width, table.k, item)
    )  # fmt: skip
    edges = [table.n, *(chunk.begin for chunk in table.chunks), *(c.end for c in table.chunks)]
    copies = zip(places.words, places.data, strict=True)
    numbers = [_numbers(table, words, data, item) for words, data in copies]
    return OneKernel(
        table=table,
        tile=tile or chosen,
        chunks=arrays.place(table.chunks, "int32"),
        places=arrays.place(numbers, "int64"),
        counts=places.counts,
        copy_places=len(numbers[0]),
        programs=min(len(table.chunks) + 1, processors),
        aligned=all(edge * item % ALIGN == 0 for edge in edges),
        chained=not table.made and can_chain(arrays),  # no gain after a library's GEMM
        arrays=arrays,
    )


def _numbers(
    table: OneKernelTable, words: Sequence[int], data: Sequence[int], item: int
) -> list[int]:
    """Return the entries of `places` of one mailbox copy; see the kernel."""
    pitch = table.n * item
    return [
        *words,
        *([base + table.kept for base in data] if table.twice else []),
        data[table.rank] + table.recv,
        *(data[rank] + table.recv + row * pitch for rank, row in table.rows_to),
    ]


def all_reduce(prepared: OneKernel, operands: Operands, control: Control) -> None:
    """Enqueue one call on the current stream: one launch.

    Products are rounded to the dtype, and their sums are float32 in the order of ranks. The bias is
    added to the sums if they are passed on, else to the products of the rank that owns the bias.

    Args:
        prepared: the prepared table.
        operands: the operands of this call.
        control: digest, stop and status words, timeout.

    Raises:
        InputError: the operands do not fit the table.
    """
    loading.enqueue(launch_of(prepared, operands, control))


def launch_of(prepared: OneKernel, operands: Operands, control: Control) -> Launch:
    """Return the launch of `all_reduce`. The device selects the copy of the mailbox.

    Raises:
        InputError: the operands do not fit the table.
    """
    arguments = _arguments(prepared, operands, control)
    return Launch(
        ALL_REDUCE, arguments, (prepared.programs,), prepared.tile.warps, chained=prepared.chained,
        dtypes={"bias": prepared.table.dtype}, odd=arguments["EDGE"] == 1, arrays=prepared.arrays,
    )  # fmt: skip


def warm(prepared: OneKernel, operands: Operands, control: Control) -> None:
    """Compile and load the kernel of `all_reduce` for such operands; compute and send nothing.

    Call it before a stream waits or is captured: loading a kernel later would wait for the stream.

    Raises:
        InputError: the operands do not fit the table.
    """
    launch = launch_of(prepared, operands, control)
    # Not the mailbox's own counts, which a call may be using.
    counts = prepared.arrays.place([0] * COUNTS, "int32")
    nothing = {"items": 0, "own_rows": 0, "peers": 0, "targets": 0, "owners": 0}
    loading.warm(launch._replace(grid=(1,)), {"counts": counts} | nothing)


def _arguments(prepared: OneKernel, operands: Operands, control: Control) -> dict[str, Any]:
    """Return the kernel's arguments by name."""
    _check(prepared.table, operands)
    table, tile = prepared.table, prepared.tile
    x, w, bias, y = operands
    peers = [rank for rank in range(table.world) if rank != table.rank]
    item, way = item_bytes(y), turned(w)
    aligned = prepared.aligned and address(y) % ALIGN == 0 == stride(y, 0) * item % ALIGN
    tallest = table.m if table.twice else table.own_rows
    widest = _WIDEST_MOVE if prepared.table.made else _WIDEST_SUM
    sum_cols = min(power(max((c.end - c.begin for c in table.chunks), default=1)), 128)
    sum_rows = min(power(tallest), widest // sum_cols)
    sum_rows = max(sum_rows, THREADS * tile.warps // sum_cols)  # see `ficco.kernels.mailbox.take`
    return {
        "x": x,
        "w": w,
        "bias": y if bias is None else bias,
        "y": y,
        "chunks": prepared.chunks,
        "places": prepared.places,
        "counts": prepared.counts,
        "stop": control.stop,
        "status": control.status,
        "digest": signed(control.digest),
        "copy_places": prepared.copy_places,
        "items": len(table.chunks),
        "m": table.m,
        "n": table.n,
        "k": table.k,
        "rank": table.rank,
        "own_row": table.own_row,
        "own_rows": table.own_rows,
        "bias_row": table.bias_row,
        "bias_rows": table.bias_rows,
        "slot_rows": table.slot_rows,
        "peers": ranks_as_bits(peers),
        "targets": ranks_as_bits(table.targets),
        "owners": ranks_as_bits(table.owners),
        "x_stride": stride(x, 0),
        "w_deep_stride": 0 if way == 1 else stride(w, 0),
        "w_col_stride": 0 if way == 0 else stride(w, 1),
        "has_bias": int(bias is not None),
        "y_stride": stride(y, 0),
        "timeout_ns": control.timeout_ns,
        "WORLD": table.world,
        "TWICE": table.twice,
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "DEEP": tile.deep,
        "STAGES": tile.stages,
        "SUM_ROWS": sum_rows,
        "SUM_COLS": sum_cols,
        "TURNED": way,
        "EDGE": ALIGN // item if aligned else 1,
        "BYTES": ALIGN if aligned else item,
        "MADE": prepared.table.made,
        "CHAINED": prepared.chained,
        "ON_GPU": prepared.arrays.on_gpu,
    }


def _check(table: OneKernelTable, operands: Operands) -> None:
    x, w, bias, y = operands
    check_bias(bias, table.bias, table.n, table.dtype)
    check_operand("x", x, (table.m, table.k), table.dtype)
    check_operand("w", w, (table.k, table.n), table.dtype)
    check_operand("y", y, (table.m, table.n), table.dtype)
    check_rows("x", x)
    check_rows("y", y)
