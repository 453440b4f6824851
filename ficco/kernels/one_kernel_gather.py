"""One launch that stores shards into peers' windows, and multiplies all shards.

It is for few rows, where the start of a copy engine and the signal of a stream take longer than the
data, and every weight should be read once. Sums are float32, over all of k or over parts of k that
are added in their order. A bias is added last, and the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ficco.core.dtypes import ELEMENT_BYTES
from ficco.core.errors import InputError
from ficco.kernels.arrays import (
    Arrays,
    address,
    call_stride,
    item_bytes,
    turned,
    weight_strides,
)
from ficco.kernels.declarations import GATHER
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
from ficco.kernels.one_kernel_all_reduce import OneKernelTile, choose_tile
from ficco.kernels.records import Operands, Places
from ficco.plan.tables import GATES, GatherTable

_WIDEST_STORE = 4096  # elements that a program stores at a time
_MOST_STORING = 32  # programs that store at peers, which must find room beside other kernels

# Constants of the model in `choose`: bytes per nanosecond into one multiprocessor, from L2 and from
# memory into all of them; microseconds for the start of a tile and for the sum of parts.
_NEAR, _OUT_OF_L2, _OUT_OF_MEMORY, _BEGIN_US, _ADD_US = 70.0, 5500.0, 4200.0, 1.0, 2.0


def choose(
    m: int, columns: Sequence[int], k: int, item: int, workers: int
) -> tuple[OneKernelTile, int]:
    """Return the tile, and the number of split-k parts, for m rows and weights of these columns.

    Narrow tiles read the rows often, and wide tiles are few. If tiles are few, several programs
    share a tile, each with a part of k. The choice is by a model, not by measurement.

    Args:
        m: rows.
        columns: columns of every output.
        k: depth, 1 or more.
        item: bytes of an element.
        workers: programs that multiply at the same time.
    """
    best: tuple[float, OneKernelTile, int] | None = None
    weights = sum(columns) * k * item
    for width in (16, 32, 64, 128):
        tile = choose_tile(m, width, k, item)
        if tile.cols < width:
            break
        tiles = sum(-(-n // tile.cols) for n in columns) * -(-m // tile.rows)
        for splits in range(1, max(1, min(8, workers // max(tiles, 1), k // tile.deep)) + 1):
            rounds, busy = -(-tiles * splits // workers), min(tiles * splits, workers)
            read = (tile.cols + tile.rows) * k / splits * item
            near = read / min(_NEAR, _OUT_OF_L2 / max(busy, 1)) / 1e3
            took = max(rounds * near, weights / _OUT_OF_MEMORY / 1e3) + rounds * _BEGIN_US
            if splits > 1:
                took += _ADD_US + splits * tile.rows * tile.cols * 4 / _NEAR / 1e3
            if best is None or took < 0.99 * best[0]:
                best = took, tile, splits
    assert best is not None
    return best[1], best[2]


def prepare(
    table: GatherTable,
    places: Places,
    arrays: Arrays,
    how: tuple[OneKernelTile, int] | None = None,
) -> Prepared:
    """Prepare a table for launches on a window.

    how: tile and number of split-k parts of a tile; by default `choose` chooses them.
    """
    processors = arrays.processors or 1  # the interpreter runs one program after another
    columns = [output.n for output in table.outputs]
    workers = max(processors - 1, 1)
    tile, splits = how or choose(table.m, columns, table.k, ELEMENT_BYTES[table.dtype], workers)
    tiles = sum(-(-n // tile.cols) for n in columns) * -(-table.m // tile.rows)
    room = tiles * splits * tile.rows * tile.cols if splits > 1 else 1
    stored = table.slices if table.own_rows else 0
    numbers = [
        [*words, *(base + table.gathered for base in data)]
        for words, data in zip(*places[:2], strict=True)
    ]
    storing = max(1, min(stored, _MOST_STORING, processors))  # the first programs store at peers
    wide = min(power(table.width or table.k), 512)  # a rank without rows may keep others' rows
    biases = sum(bool(output.bias) << i for i, output in enumerate(table.outputs))
    fixed = {
        "places": arrays.place(numbers, "int64"),
        "gates": arrays.place([0] * (GATES + tiles), "int32"),
        "parts": arrays.empty(room, "float32"),
        "plan": (
            len(numbers[0]), table.slices, stored, table.width, table.m, table.own_row,
            table.own_rows, splits, storing, biases, int(bool(table.kept)),
        ),
        "k": table.k,
        "sets": (peers_of(table), ranks_as_bits(table.sources)),
        "SPLIT": splits > 1,
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "DEEP": tile.deep,
        "STAGES": tile.stages,
        # One row, or the most rows at a time: only two kernels for all numbers of rows.
        "PUSH_ROWS": _WIDEST_STORE // wide if table.own_rows > 1 else 1,
        "PUSH_COLS": wide,
    }  # fmt: skip
    programs = min(max(tiles * splits, storing - 1) + 1, processors)
    dtypes = {"bias": table.dtype}
    return Prepared(
        GATHER, table, _arguments, fixed, programs, tile.warps, arrays, dtypes,
        finish=assuming("x", "x_stride"),
    )  # fmt: skip


def _arguments(prepared: Prepared, operands: Operands) -> dict[str, Any]:
    """Return the arguments that depend on the operands, which have the names of the table.

    x [own rows, k], the gathered x [m, k] if it is kept, and results [m, n] have unit stride along
    rows, weights [k, n] any strides, and biases [1, n] adjacent elements.
    """
    table: GatherTable = prepared.table
    _check(table, operands)
    x, kept = operands["x"], operands.get(table.kept)
    item = item_bytes(x)
    # A described launch tests the divisibility of strides in elements; see `native_launch`.
    x_stride = call_stride(x) if table.own_rows else 0
    aligned = address(x) % ALIGN == x_stride % ALIGN == table.k * item % ALIGN == 0
    outputs: list[tuple[Any, ...]] = []
    for names in table.outputs:
        w, bias, y = (operands.get(name) for name in (names.w, names.bias, names.y))
        bias = y if bias is None else bias
        outputs.append((w, bias, y, names.n, *weight_strides(w), call_stride(y)))
    turns = [turned(w) for w, *_ in outputs]
    names_of = ("w", "bias", "y", "n", "w_deep_strides", "w_col_strides", "y_strides")
    tuples = zip(*outputs or [(x, x, x, 0, 0, 0, 0)], strict=True)  # no columns: nothing is read
    return {
        "x": x,
        "kept": x if kept is None else kept,
        "x_stride": x_stride,
        "kept_stride": 0 if kept is None else call_stride(kept),
        **dict(zip(names_of, tuples, strict=True)),
        "TURNED": sum(turn << 2 * i for i, turn in enumerate(turns)),
        "EDGE": ALIGN // item if aligned else 1,
        "BYTES": ALIGN if aligned else item,
    }


def _check(table: GatherTable, operands: Operands) -> None:
    x, kept = operands["x"], operands.get(table.kept)
    if (kept is not None) != bool(table.kept):
        raise InputError(
            f"kept is {'None' if kept is None else 'given'}; the table was made "
            f"{'with' if table.kept else 'without'} one"
        )
    if kept is not None:
        check_operand(table.kept, kept, (table.m, table.k), table.dtype)
        check_rows(table.kept, kept)
    check_operand("x", x, (table.own_rows, table.k), table.dtype)
    check_rows("x", x)
    for names in table.outputs:
        y = operands.get(names.y)
        name = names.bias or f"bias of {names.y}"
        check_bias(operands.get(names.bias), bool(names.bias), names.n, table.dtype, name)
        check_operand(names.w, operands.get(names.w), (table.k, names.n), table.dtype)
        check_operand(names.y, y, (table.m, names.n), table.dtype)
        check_rows(names.y, y)


_IDLE = {"plan": (0, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0), "sets": (0, 0)}
RECORD = record_of(GATHER, prepare, _IDLE, {"gates": GATES})
