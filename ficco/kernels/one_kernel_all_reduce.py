"""One launch that multiplies, exchanges products by stores into mailboxes, and sums them.

It is for products of few rows, where the start of a copy engine and the signal of a stream take
longer than the data. Ranks synchronize within the launch, so nothing else is enqueued. For more
rows, a library computes the product in y before the launch (`OneKernelTable.made`).

Products are rounded to the dtype, and their sums are float32 in the order of ranks. The bias is
added to the sums if they are passed on, else to the products of the rank that owns the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ficco.core.dtypes import ELEMENT_BYTES
from ficco.kernels.arrays import (
    Arrays,
    address,
    call_stride,
    can_chain,
    item_bytes,
    stride,
    turned,
    weight_strides,
)
from ficco.kernels.declarations import ALL_REDUCE
from ficco.kernels.one_kernel import (
    ALIGN,
    Prepared,
    assuming,
    check_bias,
    check_operand,
    check_rows,
    peers_of,
    power,
    ranks_as_bits,
    record_of,
)
from ficco.kernels.records import Operands, Places
from ficco.plan.tables import COUNTS, THREADS, OneKernelTable

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
    arrays: Arrays,
    tile: OneKernelTile | None = None,
) -> Prepared:
    """Prepare a table for launches on a mailbox.

    tile: tile of the multiplication; by default `choose_tile` chooses it.
    """
    item = ELEMENT_BYTES[table.dtype]
    processors = arrays.processors or 1  # the interpreter runs one program after another
    width = max((chunk.end - chunk.begin for chunk in table.chunks), default=1)
    chosen = (
        _moving_tile(table.m, width) if table.made
        else choose_tile(table.m, width, table.k, item)
    )  # fmt: skip
    tile = tile or chosen
    copies = zip(places.words, places.data, strict=True)
    numbers = [_numbers(table, words, data, item) for words, data in copies]
    tallest = table.m if table.twice else table.own_rows
    widest = _WIDEST_MOVE if table.made else _WIDEST_SUM
    sum_cols = min(power(width), 128)
    sum_rows = min(power(tallest), widest // sum_cols)
    fixed = {
        "chunks": arrays.place(table.chunks, "int32"),
        "places": arrays.place(numbers, "int64"),
        "counts": places.counts,
        "plan": (
            len(numbers[0]), len(table.chunks), table.m, table.own_row, table.own_rows,
            table.bias_row, table.bias_rows, table.slot_rows,
        ),
        "n": table.n,
        "k": table.k,
        "sets": (peers_of(table), ranks_as_bits(table.owners)),
        "TWICE": table.twice,
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "DEEP": tile.deep,
        "STAGES": tile.stages,
        # See `ficco.kernels.mailbox.take`.
        "SUM_ROWS": max(sum_rows, THREADS * tile.warps // sum_cols),
        "SUM_COLS": sum_cols,
        "MADE": table.made,
    }  # fmt: skip
    programs = min(len(table.chunks) + 1, processors)
    return Prepared(
        ALL_REDUCE, table, _arguments, fixed, programs, tile.warps, arrays, {"bias": table.dtype},
        chained=not table.made and can_chain(arrays),  # no gain after a library's GEMM
        finish=assuming("y", "y_stride"),
    )  # fmt: skip


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


def _arguments(prepared: Prepared, operands: Operands) -> dict[str, Any]:
    """Return the arguments that depend on the operands: x, y, and a weight and bias by name.

    x [m, k] and y [m, n] have unit stride along rows, the weight any strides, and the bias [1, n]
    adjacent elements. y holds x.w if a library computes that before.
    """
    table: OneKernelTable = prepared.table
    (names,) = table.outputs
    x, w, bias, y = (operands.get(name) for name in ("x", names.w, names.bias, names.y))
    check_bias(bias, table.bias, table.n, table.dtype)
    check_operand("x", x, (table.m, table.k), table.dtype)
    check_operand("w", w, (table.k, table.n), table.dtype)
    check_operand("y", y, (table.m, table.n), table.dtype)
    check_rows("x", x)
    check_rows("y", y)
    item = item_bytes(y)
    edges = [table.n, *(chunk.begin for chunk in table.chunks), *(c.end for c in table.chunks)]
    edges += [stride(y, 0)]
    aligned = all(edge * item % ALIGN == 0 for edge in edges) and address(y) % ALIGN == 0
    deep_stride, col_stride = weight_strides(w)
    return {
        "x": x,
        "w": w,
        "bias": y if bias is None else bias,
        "y": y,
        "x_stride": call_stride(x),
        "w_deep_stride": deep_stride,
        "w_col_stride": col_stride,
        "has_bias": int(bias is not None),
        "y_stride": call_stride(y),
        "TURNED": turned(w),
        "EDGE": ALIGN // item if aligned else 1,
        "BYTES": ALIGN if aligned else item,
    }


RECORD = record_of(
    ALL_REDUCE, prepare, {"plan": (0,) * 8, "sets": (0, 0)}, {"counts": COUNTS}, mailbox=True
)  # fmt: skip
