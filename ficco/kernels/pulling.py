"""One launch that reads products in the windows of all ranks, and sums or moves them.

It follows a GEMM that has stored this rank's products in its window. Sums are float32, in the order
of ranks. The bias is added last, and the result is rounded once.
"""

from __future__ import annotations

from typing import Any

from ficco.core.dtypes import ELEMENT_BYTES
from ficco.kernels.arrays import Arrays, address, call_stride, item_bytes, stride
from ficco.kernels.declarations import PULL
from ficco.kernels.one_kernel import (
    ALIGN,
    Prepared,
    assuming,
    check_bias,
    check_operand,
    check_rows,
    ranks_as_bits,
    record_of,
)
from ficco.kernels.records import Operands, Places
from ficco.operators.problem import offsets
from ficco.plan.tables import GATES, PullTable

# Measured on 2 x H200 (bench/NOTES.md): 64 programs that each have 16 KiB of a peer in flight
# nearly fill a link, and 128 programs fill it.
_WARPS = 16
_BLOCK_BYTES = 16_384  # that a program reads of every rank at a time
_PROGRAMS = 128


def prepare(table: PullTable, places: Places, arrays: Arrays) -> Prepared:
    """Prepare a table for launches on a window."""
    processors = arrays.processors or 1  # the interpreter runs one program after another
    row_bytes = table.n * ELEMENT_BYTES[table.dtype]
    # Rows of y lie at the same distance from these addresses as from the address of y.
    shifts = [(each.row - each.top) * row_bytes for each in table.taken] or [0] * table.world
    first = offsets(table.rows or [each.rows for each in table.taken])
    numbers = [
        [
            *words,
            *(base + table.products + shift for base, shift in zip(data, shifts, strict=False)),
            *(base + table.sums for base in data),
            *first,
        ]
        for words, data in zip(*places[:2], strict=True)
    ]
    block = _BLOCK_BYTES // ELEMENT_BYTES[table.dtype]
    # Programs divide blocks, or chunks.
    items = table.chunks if table.twice else -(-table.m * table.n // block)
    owners = [rank for rank, rows in enumerate(table.rows) if rows and rank != table.rank]
    fixed = {
        "places": arrays.place(numbers, "int64"),
        "gates": arrays.place([0] * GATES, "int32"),
        "copy_places": len(numbers[0]),
        "items": items,
        "m": table.m,
        "n": table.n,
        "owners": ranks_as_bits(owners),
        "TWICE": table.twice,
        "MOVES": table.moves,
        "SIZE": block,
    }
    programs = max(1, min(items, _PROGRAMS, processors))
    dtypes = {"bias": table.dtype}
    return Prepared(
        PULL, table, _arguments, fixed, programs, _WARPS, arrays, dtypes,
        fewest=max(1, min(programs, processors // (2 * table.world))), finish=assuming("y"),
    )  # fmt: skip


def _arguments(prepared: Prepared, operands: Operands) -> dict[str, Any]:
    """Return the arguments that depend on the operands: y and a bias, by the table's names.

    y [m, n] has unit stride along rows, and the bias [1, n] adjacent elements.
    """
    table: PullTable = prepared.table
    (names,) = table.outputs
    bias, y = operands.get(names.bias), operands.get(names.y)
    check_bias(bias, table.bias, table.n, table.dtype)
    check_operand("y", y, (table.m, table.n), table.dtype)
    check_rows("y", y)
    item = item_bytes(y)
    flat = stride(y, 0) == table.n or table.m == 1
    # `size` divides the first elements of items and of peers' rows. All ranks use the same rule,
    # because the kernels of a call are chosen from the sizes of a few ranks.
    whole = table.made == table.m and not (table.twice or table.moves)  # all sum all rows
    size = table.m * table.n if whole else table.n
    aligned = flat and size * item % ALIGN == 0 == address(y) % ALIGN
    return {
        "bias": y if bias is None else bias,
        "y": y,
        "y_stride": call_stride(y),
        "BIAS": bias is not None,
        "FLAT": flat,
        "EDGE": ALIGN // item if aligned else 1,
        "BYTES": ALIGN if aligned else item,
    }


RECORD = record_of(PULL, prepare, {"items": 0, "peers": 0, "owners": 0}, {"gates": GATES})
