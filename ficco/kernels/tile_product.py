"""What the gated kernels do with one tile: find its place, multiply, store. Device code only.

Parts are rows of a table, int32 [parts + 1, 5]: the first row of a part in its source, and in c,
its rows, the index of the word that it waits for or -1, and its first tile. The last row ends the
tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["A_ROW", "C_ROW", "FIRST", "PART_ROWS", "WORD", "entry_of", "find_part", "multiplied",
           "place_in", "store"]  # fmt: skip

# Fields of the table's rows.
A_ROW = tl.constexpr(0)
C_ROW = tl.constexpr(1)
PART_ROWS = tl.constexpr(2)
WORD = tl.constexpr(3)
FIRST = tl.constexpr(4)
_FIELDS = tl.constexpr(5)


@triton.jit
def entry_of(table, part):
    """Return the pointer to a part's row."""
    return table + part * _FIELDS


@triton.jit
def find_part(table, part, tile):
    """Return the part that a tile belongs to: `part`, or one behind it."""
    while tile >= tl.load(entry_of(table, part + 1) + FIRST):
        part += 1
    return part


@triton.jit
def place_in(
    entry,
    tile,
    n,
    ROWS: tl.constexpr,  # noqa: N803 - Triton's way to mark constants
    COLS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
):
    """Return the first row and column of a tile in its part of n columns."""
    number = tile - tl.load(entry + FIRST)
    columns = tl.cdiv(n, COLS)
    top = number // (GROUP * columns) * GROUP
    height = tl.minimum(tl.cdiv(tl.load(entry + PART_ROWS), ROWS) - top, GROUP)
    number %= GROUP * columns
    return (top + number % height) * ROWS, number // height * COLS


@triton.jit
def multiplied(  # noqa: PLR0913 - a kernel's arguments are its interface
    a,
    a_row,
    rows,
    a_stride,
    b,
    col,
    n,
    b_deep_stride,
    b_col_stride,
    k,
    ROWS: tl.constexpr,  # noqa: N803
    COLS: tl.constexpr,  # noqa: N803
    DEEP: tl.constexpr,  # noqa: N803
    A_BULK: tl.constexpr,  # noqa: N803
    B_BULK: tl.constexpr,  # noqa: N803
    B_TURNED: tl.constexpr,  # noqa: N803
    ON_GPU: tl.constexpr,  # noqa: N803
):
    """Return the float32 product of `rows` rows of a, from a_row on, and b's columns from col on.

    Rows beyond these are anything.
    """
    total = tl.zeros((ROWS, COLS), tl.float32)
    deep = tl.arange(0, DEEP)
    if not A_BULK:
        row = tl.arange(0, ROWS)
        a_at = a + (a_row + row).to(tl.int64)[:, None] * a_stride + deep[None, :]
        in_a = (row < rows)[:, None]
    if not B_BULK:
        b_col = col + tl.arange(0, COLS)
        b_at = b + b_col.to(tl.int64)[None, :] * b_col_stride
        in_b = (b_col < n)[None, :]
    for step in tl.range(0, tl.cdiv(k, DEEP)):
        at = step * DEEP
        if A_BULK:
            a_tile = a.load([a_row, at])
        else:
            a_tile = tl.load(a_at + at, mask=in_a & (deep < k - at)[None, :], other=0)
        if B_BULK:
            b_tile = b.load([col, at]).T if B_TURNED else b.load([at, col])
        else:
            b_deep = (at + deep).to(tl.int64)[:, None] * b_deep_stride
            b_tile = tl.load(b_at + b_deep, mask=in_b & (deep < k - at)[:, None], other=0)
        if not ON_GPU:  # the interpreter multiplies bfloat16 as integers
            a_tile = a_tile.to(tl.float32)
            b_tile = b_tile.to(tl.float32)
        total = tl.dot(a_tile, b_tile, total, input_precision="ieee")
    return total


@triton.jit
def store(  # noqa: PLR0913
    total,
    c,
    c_row,
    rows,
    c_stride,
    col,
    n,
    bias,
    bias_stride,
    ROWS: tl.constexpr,  # noqa: N803
    COLS: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
):
    """Store `rows` rows of a tile (+ bias): masked, so what lies behind them is not written."""
    row = tl.arange(0, ROWS)
    c_col = col + tl.arange(0, COLS)
    if HAS_BIAS:
        term = tl.load(bias + c_col.to(tl.int64) * bias_stride, mask=c_col < n, other=0)
        total += term.to(tl.float32)[None, :]
    at = c + (c_row + row).to(tl.int64)[:, None] * c_stride + c_col[None, :]
    inside = (row < rows)[:, None] & (c_col < n)[None, :]
    tl.store(at, total.to(c.dtype.element_ty), mask=inside)
