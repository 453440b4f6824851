"""One launch that multiplies, stores rows or products at peers, and finishes what arrives.

Tiles and roundings are those of the gated kernels; see `sending_kernel` for the order of programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ficco.core.dtypes import ELEMENT_BYTES
from ficco.kernels.arrays import (
    Arrays,
    Bulk,
    address,
    call_stride,
    has_bulk_loads,
    item_bytes,
    stride,
    turned,
    weight_strides,
)
from ficco.kernels.declarations import SENDING
from ficco.kernels.gated import has_descriptor
from ficco.kernels.gated_tables import tile_places
from ficco.kernels.one_kernel import (
    ALIGN,
    Prepared,
    assuming,
    check_bias,
    check_operand,
    check_rows,
    operands_of,
    record_of,
)
from ficco.kernels.records import Of, Operands, Places
from ficco.lowering.cutting import chunk_bounds
from ficco.lowering.sending import KEPT, SENT
from ficco.plan import Region
from ficco.plan.tables import FINISHES, GATES, GatedPart, SendTable
from ficco.program import OneKernel
from ficco.program.tiling import Tile, choose_tile

# Programs that copy rows of x to peers. Measured on 2 x H200 (bench/NOTES.md): 64 that each have
# 16 KiB in flight nearly fill a link, and 128 fill it. They have the device to themselves if a
# library multiplies. Beside products, a program copies about 20 KB in a microsecond, and a
# multiprocessor makes this many operations.
_MOST_SENDERS = {"multiply": 64, "keep": 128}
_SENT_IN_US, _OPERATIONS_IN_US = 20_000, {2: 4.7e6, 4: 0.3e6}  # the latter by bytes of an element
_SENDER_STEP = 8
# What a program copies out of the window at a time, in a call whose products a library makes.
_MOVED = Tile(32, 256, 64, 8, 3, 1, 1, 1.0)
# Fields of a row of jobs, see `tile_product`.
_PART, _AWAITED, _RAISED, _PEER, _ROW, _FIELDS = 5, 6, 7, 9, 10, 11
_NONE = np.zeros((0, _FIELDS), np.int32)


class _Part(NamedTuple):
    """Rows [row, row + rows) of a source, and their first row in the target.

    Attributes:
        row, top, rows: as above.
        begin: the first row in the block of the pair of ranks.
        chunk: number of the chunk whose signal is awaited or raised.
        peer: that gets or has sent the rows.
    """

    row: int
    top: int
    rows: int
    begin: int = 0
    chunk: int = 0
    peer: int = 0


class _Parts(NamedTuple):
    """The parts of a call, each kind in the order in which programs take them.

    Attributes:
        sent: rows of x or of products, for peers.
        own: rows that stay here.
        arrived: rows of x that arrive, and are multiplied.
        moved: rows that arrive, and are copied to a result.
    """

    sent: list[_Part]
    own: list[_Part]
    arrived: list[_Part]
    moved: list[_Part]


def _in_chunks(
    table: SendTable, blocks: Iterable[tuple[int, int, int, int]], shift: int = 0
) -> list[_Part]:
    """Return blocks (peer, row, top, rows) in chunks: one of each block, then the next of each."""
    parts = [
        _Part(row + begin, top + begin, end - begin, begin, shift + number, peer)
        for peer, row, top, rows in blocks
        for number, (begin, end) in enumerate(pairwise(chunk_bounds(rows, table.chunks, "none")))
        if begin < end
    ]
    return sorted(parts, key=lambda part: part.chunk)  # stable


def _parts_of(table: SendTable) -> _Parts:
    arrived = _in_chunks(table, [(peer, top, top, rows) for peer, top, rows in table.received])
    own = (table.rank, table.row, table.top, table.rows)
    whole = [_Part(table.row, table.top, table.rows)] if table.rows else []
    sums = [(owner, row, row, rows) for owner, row, _, rows in table.sent]
    moved = {"multiply": arrived if table.kept else [], "keep": arrived, "move": arrived, "sum": []}
    return _Parts(
        sent=_in_chunks(table, table.sent),
        own=_in_chunks(table, [own]) if table.adds else [] if table.finish == "keep" else whole,
        arrived=arrived if table.finish == "multiply" else [],
        moved=moved.get(table.finish) or (
            _in_chunks(table, sums, table.chunks) if table.finish == "share" else []),
    )  # fmt: skip


def _jobs(table: SendTable, parts: _Parts, tile: Tile) -> tuple[Any, list[int]]:
    """Return the rows of the kernel's jobs, by kind, and the number of the first of each next kind.

    The kinds are rows or products for peers, own tiles, tiles of rows that arrive, and moves.
    """
    widths = tuple([names.n for names in table.outputs])
    own, moves = _tiles(parts.own, widths, tile), _tiles(parts.moved, widths, tile)
    first = _tiles(parts.sent, widths, tile)
    if not table.sends_products:
        first, moves = _groups(table, parts.sent), _tiles(parts.moved, (table.k,), tile)
        if not table.kept and not any(widths):  # a program that waits for each chunk
            waits = [[0] * _AWAITED + [part.chunk, 0, 0, part.peer, 0] for part in parts.arrived]
            moves = np.array(waits, np.int32)
    if table.finish == "share":  # own parts are counted; their signals follow those of products
        own[:, _PART] += len(parts.sent)
        own[:, _RAISED] += table.chunks
    kinds = [first, own, _tiles(parts.arrived, widths, tile), moves]
    kinds = [each.reshape(-1, _FIELDS) for each in kinds]
    return np.concatenate(kinds), np.cumsum([len(each) for each in kinds]).tolist()


def _groups(table: SendTable, sent: Sequence[_Part]) -> Any:
    """Return a row for each part of x that all senders copy, own rows that are kept among them."""
    rows = [[p.row, p.top, p.rows, 0, 0, i, 0, p.chunk, 0, p.peer, 0] for i, p in enumerate(sent)]
    if table.kept and table.rows:
        rows.append([table.row, table.top, table.rows, 0, 0, len(sent), 0, 0, 0, table.rank, 0])
    return np.array(rows, np.int32)


def _tiles(parts: Sequence[_Part], widths: tuple[int, ...], tile: Tile) -> Any:
    """Return a row for each tile of parts; with several widths, of the product of each width."""
    gated = [
        GatedPart("own", p.row, p.top, p.rows, p.chunk, p.chunk, cols=width)
        for p in parts
        for width in widths
    ]
    rows = tile_places(gated, max(widths), tile)[:-1]
    number, product = np.divmod(rows[:, _PART], len(widths))
    rows[:, _PART] = number
    rows[:, _PEER] = [parts[i].peer for i in number]
    rows[:, _ROW] += np.array([parts[i].begin for i in number], np.int32)
    if len(widths) > 1:
        rows[:, _RAISED] = product
    return rows


def _senders(table: SendTable, processors: int) -> int:
    """Return the number of programs that copy rows of x.

    Beside products, it is the least with which the copies end before the products of own rows do:
    programs that copy keep multiprocessors from products.
    """
    if table.sends_products or not (table.sent or table.kept):
        return 0
    item, most = ELEMENT_BYTES[table.dtype], _MOST_SENDERS[table.finish]
    sent = sum([each.rows for each in table.sent]) * table.k * item
    own = 2.0 * table.rows * table.k * sum([names.n for names in table.outputs])
    if table.finish == "keep" or not own:
        return most
    own_us = own / processors / _OPERATIONS_IN_US[item]
    steps = math.ceil(sent / _SENT_IN_US / own_us / _SENDER_STEP)
    return min(max(steps, 1) * _SENDER_STEP, most)


def prepare(
    table: SendTable, places: Places, arrays: Arrays, tile: Tile | None = None, senders: int = 0
) -> Prepared:
    """Prepare a table for launches on a window.

    tile: of the products; by default `choose_tile` chooses it. senders: programs that copy rows of
    x; by default those of `_senders`.
    """
    item, processors = ELEMENT_BYTES[table.dtype], arrays.processors or 1
    gathers, parts = not table.sends_products, _parts_of(table)
    multiplied = [*parts.own, *(parts.arrived if gathers else parts.sent)]
    heights = [part.rows for part in multiplied for _ in table.outputs]
    widths = [names.n for _ in multiplied for names in table.outputs]
    aligned = table.k * item % ALIGN == 0
    tile = tile or choose_tile(
        heights, widths, item, processors, aligned, (), table.k, split=False
    )  # fmt: skip
    if len(table.outputs) > 1:  # weights are loaded by pointers: other tiles spill registers
        cols = tile.cols if tile.rows > 64 else min(tile.cols, 128)
        tile = tile._replace(warps=max(tile.warps, 8), cols=cols)
    if table.finish == "keep":
        tile = _MOVED
    senders = senders or _senders(table, processors)
    jobs, firsts = _jobs(table, parts, tile)
    counted = len(parts.sent) + max(len(parts.own), 1)
    numbers = [
        [*words, *(base + table.recv for base in data), *(base + table.sums for base in data)]
        for words, data in zip(*places[:2], strict=True)
    ]
    tops = {source: top for source, top, _ in table.received}
    chunk_words = table.chunks * (1 + (table.finish == "share"))
    fixed = {
        "jobs": arrays.place(jobs if len(jobs) else [[0] * _FIELDS], "int32"),
        "slot_tops": arrays.place([tops.get(rank, 0) for rank in range(table.world)], "int32"),
        "counters": arrays.place([0] * counted, "int32"),
        "places": arrays.place(numbers, "int64"),
        "gates": arrays.place([0] * GATES, "int32"),
        "sizes": (
            len(numbers[0]),
            counted,
            chunk_words,
            sum([bool(names.bias) << i for i, names in enumerate(table.outputs)]),
            senders,
            *firsts,
        ),
        "n": table.n,
        "k": table.k,
        "FINISH": FINISHES.index(table.finish),
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "DEEP": tile.deep,
    }
    programs = 1 + senders + len(jobs) - (firsts[0] if gathers else 0)
    count = 1 if table.finish == "keep" else len(table.outputs)
    tuples = [f"{name}.{i}" for name in ("w", "bias", "y") for i in range(count)]
    return Prepared(
        SENDING, table, _arguments, fixed, programs, tile.warps, arrays, {"bias": table.dtype},
        stages=tile.stages, fewest=min(programs, max(processors // table.world, 4)),
        finish=assuming("x", "kept", *tuples),
    )  # fmt: skip


def _arguments(prepared: Prepared, operands: Operands) -> dict[str, Any]:
    """Return the arguments that depend on the operands, by the names of the plan's buffers."""
    table: SendTable = prepared.table
    x, kept, window = (operands.get(name) for name in ("x", table.kept, SENT))
    outputs = table.outputs if table.finish != "keep" else ()
    for names in outputs:
        check_bias(operands.get(names.bias), bool(names.bias), names.n, table.dtype, names.bias)
        check_operand(names.w, operands.get(names.w), (table.k, names.n), table.dtype)
        check_rows(names.y, operands[names.y])
    for name, matrix in (("x", x), (table.kept, kept)):
        if matrix is not None:
            check_rows(name, matrix)
    named = [(names.w, names.y) for names in outputs] or [("x", table.kept)]
    ws, ys = ([operands[each] for each in names] for names in zip(*named, strict=True))
    fixed, item = prepared.fixed, item_bytes(ys[0])
    window, kept = x if window is None else window, ys[0] if kept is None else kept
    ways = {turned(w) for w in ws}
    way = ways.pop() if len(ways) == 1 else 2
    way = way if outputs else 0
    b, block = ws[0], (fixed["DEEP"], fixed["COLS"])
    if way == 1:
        b, block = b.T, block[::-1]
    bulk = has_bulk_loads(prepared.arrays) and bool(outputs)
    own_bulk, window_bulk, b_bulk = (bulk and has_descriptor(each) for each in (x, window, b))
    b_bulk = b_bulk and len(ws) == 1
    rows, strides = (fixed["ROWS"], fixed["DEEP"]), list[int]()
    for w, y in zip(ws, ys, strict=True):
        both = weight_strides(w)
        if way == 2 and turned(w) < 2:  # the stride of 1 is read, too, and is no call's stride
            both = (1, call_stride(w, 1)) if turned(w) else (call_stride(w, 0), 1)
        strides += [call_stride(y), *((0, 0) if b_bulk else both)]
    biases = [operands.get(names.bias) for names in outputs] or [None]
    read = [each for each in (x, kept, *ys, *ws, *biases) if each is not None]
    edges = [*[names.n for names in outputs], table.k]
    edges += [stride(each, 0) for each in (x, kept, *ys) if 0 not in each.shape]
    aligned = all(edge * item % ALIGN == 0 for edge in edges)
    aligned = aligned and all(address(each) % ALIGN == 0 for each in read)
    return {
        "own": Bulk(x, rows) if own_bulk else x,
        "window": Bulk(window, rows) if window_bulk else window,
        "b": Bulk(b, block, ws[0]) if b_bulk else ws[0],
        "x": x,
        "w": tuple(ws),
        "bias": tuple([y if bias is None else bias for bias, y in zip(biases, ys, strict=True)]),
        "y": tuple(ys),
        "kept": kept,
        "strides": (
            0 if own_bulk else call_stride(x), 0 if window_bulk else call_stride(window),
            call_stride(x), call_stride(kept), *strides,
        ),
        "OWN_BULK": own_bulk,
        "WINDOW_BULK": window_bulk,
        "B_BULK": b_bulk,
        "B_TURNED": way,
        "COL_STEP": ALIGN // item if aligned else 1,
        "BYTES": ALIGN if aligned else item,
    }  # fmt: skip


def _operands(work: OneKernel, of: Of, matrices: Mapping[str, Region]) -> dict[str, Any]:
    """Return the operands of a call, and the window of rows of x that peers send."""
    table: Any = work.table
    found = operands_of(work, of, matrices)
    rows = max([top + rows for _, top, rows in table.received], default=0)
    if not table.sends_products and rows:
        found[SENT] = of(Region(table.rank, SENT, 0, rows, 0, table.k))
    if table.kept == KEPT:
        found[KEPT] = of(Region(table.rank, KEPT, 0, table.arriving, 0, table.k))
    return found


RECORD = record_of(SENDING, prepare, {"peers": 0}, {"gates": GATES}, tiled=True, operands=_operands)
