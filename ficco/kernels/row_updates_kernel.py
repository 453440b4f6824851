"""Sums of gradients by table row, and the update of each row by its sum. Device code only.

The lookups are sorted by row. A segment is a run of lookups of one row. Programs work on tiles of
TILE lookups. A segment inside a tile is summed by the tile's program, which also updates the row.
Of a segment that crosses tiles each program stores its part in `carry`; a second kernel adds the
parts up. So equal inputs give equal bits, and each row is written once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import (
    FIND_SEGMENTS,
    LIST_LOOKUPS,
    UPDATE_ROWS,
    UPDATE_SPLIT_ROWS,
)
from ficco.kernels.pooled_block import block_sums

__all__ = ["find_segments", "list_lookups", "update_rows", "update_split_rows"]

# What happens to a row; `ficco.kernels.row_updates` has these numbers, too.
_STORE = tl.constexpr(0)
_ADAGRAD = tl.constexpr(2)
_SCAN = tl.constexpr(64)  # tiles whose first rows are compared at once
_PARTS = tl.constexpr(16)  # parts of a segment that are added at once


@triton.jit
def _element(values, number):
    """Return one of a tuple's numbers or addresses, as int64."""
    chosen = values[0].to(tl.int64)
    for i in tl.static_range(1, len(values)):
        chosen = tl.where(number == i, values[i].to(tl.int64), chosen)
    return chosen


@triton.jit(do_not_specialize=LIST_LOOKUPS.unknown)
def list_lookups(  # noqa: PLR0913 - a kernel's arguments are its interface
    keys,
    bags,
    indices,
    starts,
    begins,
    counts,
    firsts,
    columns,
    batch: tl.int32,
    across: tl.int32,
    steps: tl.int32,
    TILE: tl.constexpr,
):
    """List the lookups of all tables, table by table: a key and a bag for each.

    The second dimension of the grid is the number of the table.

    keys, bags: receive int32, per lookup: the first key of the table plus the row; and bag x across
        plus the table's column.
    indices, starts: per table, the rows of all lookups, and the first lookup of each bag.
    begins, counts, firsts, columns: per table, its place in the list, number of lookups, first key,
        and column.
    steps: of a search among the starts; 2^steps is more than batch.
    """
    table = tl.program_id(1)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = place < _element(counts, table).to(tl.int32)
    own_indices = _element(indices, table).to(indices[0].dtype)
    own_starts = _element(starts, table).to(starts[0].dtype)
    row = tl.load(own_indices + place, mask=inside, other=0).to(tl.int32)
    low, high = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32) + batch
    for _ in tl.range(0, steps):  # for the number of bags that start at `place` or before
        middle = (low + high) // 2
        searching = inside & (low < high)
        start = tl.load(own_starts + middle, mask=searching, other=0)
        low = tl.where(searching & (start <= place), middle + 1, low)
        high = tl.where(searching & (start > place), middle, high)
    at = _element(begins, table) + place
    tl.store(keys + at, _element(firsts, table).to(tl.int32) + row, mask=inside)
    bag = (low - 1) * across + _element(columns, table).to(tl.int32)
    tl.store(bags + at, bag, mask=inside)


@triton.jit(do_not_specialize=FIND_SEGMENTS.unknown)
def find_segments(  # noqa: PLR0913 - a kernel's arguments are its interface
    keys,
    order,
    bags,
    factors,
    starts,
    counts,
    sorted_bags,
    sorted_factors,
    places,
    squares_at,
    tables,
    pitches,
    firsts,
    accumulators,
    total: tl.int32,
    TILE: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Find the segments of each tile, and sort bags and factors as the keys.

    keys: int32 [total], sorted; the tables are stacked one below the other.
    order: int64 [total], the lookup of each key.
    bags, factors: of each lookup, int32 and float32. Without WEIGHTED factors are not read.
    starts: receives per tile the positions where segments start.
    counts: receives the number of segments of each tile.
    sorted_bags, sorted_factors: receive bags and factors in the order of the keys.
    places, squares_at: receive the address of each segment's row, and that of its accumulator.
    tables, pitches, firsts, accumulators: per table its address, bytes from row to row, key of its
        first row, and address of the accumulators, float32 [rows], or 0. These keys rise.
    """
    begin = tl.program_id(0) * TILE
    at = begin + tl.arange(0, TILE)
    inside = at < total
    key = tl.load(keys + at, mask=inside, other=0)
    before = tl.load(keys + at - 1, mask=inside & (at > begin), other=-1)
    starting = inside & (key != before)
    number = begin + tl.cumsum(starting.to(tl.int32), 0) - 1
    tl.store(starts + number, at, mask=starting)
    tl.store(counts + tl.program_id(0), tl.sum(starting.to(tl.int32), 0))
    place = tl.zeros((TILE,), tl.int64)
    total_at = tl.zeros((TILE,), tl.int64)
    for i in tl.static_range(len(tables)):
        first = firsts[i].to(tl.int32)
        row = (key - first).to(tl.int64)
        place = tl.where(key >= first, tables[i] + row * pitches[i], place)
        total_at = tl.where(key >= first, accumulators[i] + row * 4, total_at)
    tl.store(places + number, place, mask=starting)
    tl.store(squares_at + number, total_at, mask=starting)
    lookup = tl.load(order + at, mask=inside, other=0)
    tl.store(sorted_bags + at, tl.load(bags + lookup, mask=inside, other=0), mask=inside)
    if WEIGHTED:
        factor = tl.load(factors + lookup, mask=inside, other=0)
        tl.store(sorted_factors + at, factor, mask=inside)


@triton.jit
def _rate_of(rate, has_rate, bits):
    """Return the learning rate: from the device's memory, or the float32 of these bits."""
    given = bits.to(tl.float32, bitcast=True)
    return tl.where(has_rate != 0, tl.load(rate, mask=has_rate != 0, other=0), given)


@triton.jit
def _factor(squares, dim, total_at, exists, kind, rate, epsilon):
    """Return the factors of sums, and for Adagrad add to the accumulators.

    squares: [BAGS], of the sums.
    total_at: [BAGS], pointers to the accumulators.
    """
    factor = tl.zeros_like(squares) + rate
    if kind == _ADAGRAD:
        total = tl.load(total_at, mask=exists, other=0) + squares / dim
        tl.store(total_at, total, mask=exists)
        factor = rate / (tl.sqrt_rn(total) + epsilon)
    return factor


@triton.jit
def _width(dim, left, COLS: tl.constexpr, EDGE: tl.constexpr):
    """Return the number of columns from `left` on, COLS at most. The compiler knows a divisor."""
    return tl.multiple_of(tl.minimum(dim - left, COLS), EDGE)


@triton.jit
def _change(
    rows,
    dim,
    sums,
    factor,
    exists,
    kind,
    COLS: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Store the sums in `dim` columns of the rows, or subtract factor x sums from them.

    rows: [BAGS], pointers to the first of these columns.
    """
    col = tl.arange(0, COLS)[None, :]
    mask = exists[:, None] & (col < _width(dim, 0, COLS, EDGE))
    at = rows[:, None] + col
    change = sums
    if kind != _STORE:
        old = tl.load(at, mask=mask, other=0).to(tl.float32)
        change = old - sums * factor[:, None]
    tl.store(at, change.to(rows.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=UPDATE_ROWS.unknown)
def update_rows(  # noqa: PLR0913 - a kernel's arguments are its interface
    gradients,
    table,
    keys,
    starts,
    counts,
    sorted_bags,
    sorted_factors,
    places,
    squares_at,
    carry,
    rate,
    total: tl.int32,
    dim: tl.int32,
    stride: tl.int64,
    kind: tl.int32,
    has_rate: tl.int32,
    rate_bits: tl.int32,
    epsilon_bits: tl.int32,
    TILE: tl.constexpr,
    BAGS: tl.constexpr,
    COLS: tl.constexpr,
    LOOKUPS: tl.constexpr,
    EDGE: tl.constexpr,
    BYTES: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Sum the segments of a tile, and update the rows of those that lie in the tile.

    gradients: of bags, rows of `stride` elements.
    table: any array of the dtype of the rows.
    keys to squares_at: see `find_segments`.
    carry: float32 [tiles, 2, dim], receives the part of a segment from an earlier tile, and that
        of a segment that goes on in the next tile.
    rate, has_rate, rate_bits: the learning rate, in memory if has_rate is 1, else by its bits.
    kind: 0: store the sums; 1: SGD; 2: row-wise Adagrad.
    EDGE, BYTES: elements that divide strides and dim; bytes that divide addresses.
    """
    tile = tl.program_id(0)
    begin = tile * TILE
    end = tl.minimum(begin + TILE, total)
    count = tl.load(counts + tile)
    some = begin < total  # grids are rounded up: the last tiles may have no lookups
    before = tl.load(keys + begin - 1, mask=some & (tile > 0), other=-1)
    after = tl.load(keys + end, mask=end < total, other=-1)
    earlier = before == tl.load(keys + begin, mask=some, other=-2)
    later = after == tl.load(keys + end - 1, mask=some, other=-2)
    learning_rate = _rate_of(rate, has_rate, rate_bits)
    epsilon = epsilon_bits.to(tl.float32, bitcast=True)
    pitch = tl.multiple_of(stride.to(tl.int32), EDGE)
    source = tl.multiple_of(gradients.to(tl.int64).to(gradients.dtype), BYTES)
    for first in tl.range(0, count, BAGS):
        number = first + tl.arange(0, BAGS)
        exists = number < count
        start = tl.load(starts + begin + number, mask=exists, other=0)
        stop = tl.load(starts + begin + number + 1, mask=number + 1 < count, other=0)
        stop = tl.where(number + 1 < count, stop, end)
        lookups = tl.where(exists, stop - start, 0)
        from_before = (number == 0) & earlier
        split = exists & (from_before | ((number == count - 1) & later))
        whole = exists & (split == 0)
        at, factors = sorted_bags + start, sorted_factors + start
        totals = block_sums(
            source, pitch, _width(dim, 0, COLS, EDGE), at, factors, True, lookups,
            BAGS, COLS, LOOKUPS, WEIGHTED,
        )  # fmt: skip
        squares = tl.sum(totals * totals, 1)
        if kind == _ADAGRAD:
            for left in tl.range(COLS, dim, COLS):
                more = block_sums(
                    source + left, pitch, _width(dim, left, COLS, EDGE), at, factors, True, lookups,
                    BAGS, COLS, LOOKUPS, WEIGHTED,
                )  # fmt: skip
                squares += tl.sum(more * more, 1)
        row = tl.load(places + begin + number, mask=whole, other=0).to(table.dtype)
        row = tl.multiple_of(row, BYTES)
        total_at = tl.load(squares_at + begin + number, mask=whole, other=0).to(carry.dtype)
        factor = _factor(squares, dim, total_at, whole, kind, learning_rate, epsilon)
        slot = carry + (2 * tile + (from_before == 0).to(tl.int32)).to(tl.int64) * dim
        for left in tl.range(0, dim, COLS):
            if left > 0:
                totals = block_sums(
                    source + left, pitch, _width(dim, left, COLS, EDGE), at, factors, True, lookups,
                    BAGS, COLS, LOOKUPS, WEIGHTED,
                )  # fmt: skip
            _change(row + left, dim - left, totals, factor, whole, kind, COLS, EDGE)
            col = tl.arange(0, COLS)[None, :]
            mask = split[:, None] & (col < _width(dim, left, COLS, EDGE))
            tl.store((slot + left)[:, None] + col, totals, mask=mask)


@triton.jit
def _whole_sum(carry, tile, parts, left, dim, COLS: tl.constexpr):
    """Return some columns of the sum of a segment that starts in a tile, [1, COLS]."""
    col = left + tl.arange(0, COLS)[None, :]
    sums = tl.load(carry + (2 * tile + 1).to(tl.int64) * dim + col, mask=col < dim, other=0)
    for part in tl.range(0, parts, _PARTS):
        number = part + tl.arange(0, _PARTS)[:, None]
        at = carry + (2 * (tile + 1 + number)).to(tl.int64) * dim + col
        more = tl.load(at, mask=(number < parts) & (col < dim), other=0)
        sums += tl.sum(more, 0)[None, :]
    return sums


@triton.jit(do_not_specialize=UPDATE_SPLIT_ROWS.unknown)
def update_split_rows(  # noqa: PLR0913 - a kernel's arguments are its interface
    table,
    keys,
    counts,
    places,
    squares_at,
    carry,
    rate,
    total: tl.int32,
    dim: tl.int32,
    kind: tl.int32,
    has_rate: tl.int32,
    rate_bits: tl.int32,
    epsilon_bits: tl.int32,
    TILE: tl.constexpr,
    COLS: tl.constexpr,
):
    """Update the row of the segment that starts in a tile and goes on in later tiles, if any.

    The arguments are those of `update_rows`, which ran before.
    """
    tile = tl.program_id(0)
    begin, end = tile * TILE, (tile + 1) * TILE
    goes_on = False
    key = -1
    if end < total:
        key = tl.load(keys + end - 1)
        starts_here = (tile == 0) | (tl.load(counts + tile) > 1)
        if tile > 0:
            starts_here = starts_here | (tl.load(keys + begin - 1) != key)
        goes_on = starts_here & (tl.load(keys + end) == key)
    if goes_on:
        parts = 0
        found = _SCAN + 0
        while found == _SCAN:
            at = (tile + 1 + parts + tl.arange(0, _SCAN)) * TILE
            found = tl.sum((tl.load(keys + at, mask=at < total, other=-1) == key).to(tl.int32), 0)
            parts += found
        squares = tl.zeros((1,), tl.float32)
        if kind == _ADAGRAD:
            for left in tl.range(0, dim, COLS):
                part = _whole_sum(carry, tile, parts, left, dim, COLS)
                squares += tl.sum(part * part, 1)
        number = begin + tl.load(counts + tile) - 1 + tl.arange(0, 1)
        row = tl.load(places + number).to(table.dtype)
        total_at = tl.load(squares_at + number).to(carry.dtype)
        exists = number >= 0
        learning_rate = _rate_of(rate, has_rate, rate_bits)
        epsilon = epsilon_bits.to(tl.float32, bitcast=True)
        factor = _factor(squares, dim, total_at, exists, kind, learning_rate, epsilon)
        for left in tl.range(0, dim, COLS):
            part = _whole_sum(carry, tile, parts, left, dim, COLS)
            _change(row + left, dim - left, part, factor, exists, kind, COLS, 1)
