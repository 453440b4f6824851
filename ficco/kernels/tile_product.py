"""Processing of one tile in the gated kernels: lookup, product, store. Device code only.

The table of tiles is int32 [tiles + 1, 11]. A row holds: the tile's first row in its source and in
its target; the rows of its part from there on; its first column; the end of its part's columns; its
part; the indices of the words that the part waits for and raises, or -1; the number of tiles of the
part; 1 if the target is `partial`; its first row in the part. The last row has a separate part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.signals import count_tiles
from ficco.kernels.sum_epilogue import halves, store_columns, store_sum

__all__ = ["AWAITED", "AWAY", "COLUMN", "COLUMNS_END", "COUNT", "HEIGHT", "PART", "PLACE_FIELDS",
           "RAISED", "ROW", "SOURCE_ROW", "TARGET_ROW", "count_stored", "multiplied",
           "store_summed", "store_tile", "target_of"]  # fmt: skip

# Fields of the rows of a table of tiles.
SOURCE_ROW = tl.constexpr(0)
TARGET_ROW = tl.constexpr(1)
HEIGHT = tl.constexpr(2)
COLUMN = tl.constexpr(3)
COLUMNS_END = tl.constexpr(4)
PART = tl.constexpr(5)
AWAITED = tl.constexpr(6)
RAISED = tl.constexpr(7)
COUNT = tl.constexpr(8)
AWAY = tl.constexpr(9)
ROW = tl.constexpr(10)
PLACE_FIELDS = tl.constexpr(11)


@triton.jit
def multiplied(  # noqa: PLR0913 - a kernel's arguments are its interface
    a,
    place,
    a_stride,
    b,
    b_deep_stride,
    b_col_stride,
    first,
    past,
    k,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEEP: tl.constexpr,
    A_BULK: tl.constexpr,
    B_BULK: tl.constexpr,
    B_TURNED: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Return the float32 product of a tile over depth steps first to past.

    Rows beyond the tile's are undefined. B_TURNED: 0, elements of a row of b are adjacent; 1,
    elements of a column; 2, neither. Bulk loads need 0 or 1.
    """
    a_row = tl.load(place + SOURCE_ROW)
    rows = tl.load(place + HEIGHT)
    col = tl.load(place + COLUMN)
    n = tl.load(place + COLUMNS_END)
    total = tl.zeros((ROWS, COLS), tl.float32)
    deep = tl.arange(0, DEEP)
    if not A_BULK:
        row = tl.arange(0, ROWS)
        a_at = a + (a_row + row).to(tl.int64)[:, None] * a_stride + deep[None, :]
        in_a = (row < rows)[:, None]
    if not B_BULK:
        b_col = col + tl.arange(0, COLS)
        # A stride of 1 is explicit, so that the compiler knows which elements are adjacent.
        b_at = (
            b + b_col[None, :] if B_TURNED == 0 else b + b_col.to(tl.int64)[None, :] * b_col_stride
        )
        in_b = (b_col < n)[None, :]
    for step in tl.range(first, past):
        at = step * DEEP
        if A_BULK:
            a_tile = a.load([a_row, at])
        else:
            a_tile = tl.load(a_at + at, mask=in_a & (deep < k - at)[None, :], other=0)
        if B_BULK:
            b_tile = b.load([col, at]).T if B_TURNED == 1 else b.load([at, col])
        else:
            b_deep = (at + deep)[:, None]
            if B_TURNED != 1:
                b_deep = (at + deep).to(tl.int64)[:, None] * b_deep_stride
            b_tile = tl.load(b_at + b_deep, mask=in_b & (deep < k - at)[:, None], other=0)
        if not ON_GPU:  # the interpreter multiplies bfloat16 as integers
            a_tile = a_tile.to(tl.float32)
            b_tile = b_tile.to(tl.float32)
        total = tl.dot(a_tile, b_tile, total, input_precision="ieee")
    return total


@triton.jit
def target_of(
    place,
    c,
    c_stride,
    partial,
    partial_stride,
    has_bias,
):
    """Return a tile's target, the target's stride, and has_bias, which is 0 for `partial`."""
    away = tl.load(place + AWAY) != 0
    target = tl.where(away, partial, c)
    stride = tl.where(away, partial_stride, c_stride)
    biased = tl.where(away, 0, has_bias)
    return target, stride, biased


@triton.jit
def count_stored(
    places,
    tile,
    whole,
    stored,
    counters,
    signals,
    ON_GPU: tl.constexpr,
):
    """Return how many stored tiles of the part this program has not counted, with this one.

    It counts them when its next tile is of another part or is split.
    """
    place = places + tile * PLACE_FIELDS
    following = tl.minimum(tile + tl.num_programs(0), whole)
    part = tl.load(place + PART)
    word = tl.load(place + RAISED)
    stored += 1
    leaves = (following == whole) | (tl.load(places + following * PLACE_FIELDS + PART) != part)
    told = tl.where(leaves & (word >= 0), stored, 0)
    count_tiles(counters + part, told, tl.load(place + COUNT), signals + word, ON_GPU)
    return tl.where(leaves, 0, stored)


@triton.jit
def store_tile(  # noqa: PLR0913
    total,
    c,
    place,
    c_stride,
    bias,
    has_bias,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    COL_STEP: tl.constexpr,
    BEGUN: tl.constexpr,
):
    """Store a tile of the table of tiles (+ the old value, if BEGUN) (+ bias, if has_bias).

    It stores by halves, whose exchange between threads needs half the memory. COL_STEP divides the
    first columns of tiles and the end columns of parts.
    """
    # The compiler loses divisibility hints between loops; this expression restores them.
    col = tl.load(place + COLUMN) // COL_STEP * COL_STEP
    end = tl.load(place + COLUMNS_END) // COL_STEP * COL_STEP
    c_row = tl.load(place + TARGET_ROW)
    rows = tl.load(place + HEIGHT)
    HALF: tl.constexpr = COLS // 2  # noqa: N806
    left, right = halves(total, ROWS, COLS)
    store_columns(
        left, c, c, 0, c_stride, c, c_row, rows, c_stride, col, end, bias, has_bias,
        ROWS, HALF, 0, 0, BEGUN,
    )  # fmt: skip
    store_columns(
        right, c, c, 0, c_stride, c, c_row, rows, c_stride, col + HALF, end, bias, has_bias,
        ROWS, HALF, 0, 0, BEGUN,
    )  # fmt: skip


@triton.jit
def store_summed(  # noqa: PLR0913
    total,
    recv,
    terms,
    recv_stride,
    c,
    place,
    c_stride,
    bias,
    has_bias,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TERMS: tl.constexpr,
    OWN_AT: tl.constexpr,
    BEGUN: tl.constexpr,
    COL_STEP: tl.constexpr,
):
    """Store a tile of the table of tiles, summed with its part's terms; see `sum_epilogue`."""
    col = tl.load(place + COLUMN) // COL_STEP * COL_STEP
    end = tl.load(place + COLUMNS_END) // COL_STEP * COL_STEP
    store_sum(
        total, recv, terms, tl.load(place + ROW), recv_stride, c,
        tl.load(place + TARGET_ROW), tl.load(place + HEIGHT), c_stride, col, end, bias, has_bias,
        ROWS, COLS, TERMS, OWN_AT, BEGUN,
    )  # fmt: skip
