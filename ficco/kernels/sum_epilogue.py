"""The epilogue that adds peers' terms to a tile and stores the sum. Device code only.

The order of sums is that of `summing`: from zero, terms in the order of ranks, the own product in
its rank's place (with the target's old value, if BEGUN), the bias last; all in float32, rounded
once. It processes a quarter of the columns at a time, so that the running sum fits into registers
beside the product.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["TERM_FIELDS", "TERM_ROW", "TERM_WORD", "halves", "quarter", "store_columns",
           "store_sum"]  # fmt: skip

# Fields of a term in the table of terms.
TERM_ROW = tl.constexpr(0)
TERM_WORD = tl.constexpr(1)
TERM_FIELDS = tl.constexpr(2)


@triton.jit
def halves(
    tile,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Return the left and the right half of a tile."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLS // 2)), (0, 2, 1)))


@triton.jit
def quarter(
    tile,
    i: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Return the i-th quarter of a tile's columns."""
    left, right = halves(tile, ROWS, COLS)
    first, second = halves(left if i < 2 else right, ROWS, COLS // 2)
    return first if i % 2 == 0 else second


@triton.jit
def store_columns(  # noqa: PLR0913 - a kernel's arguments are its interface
    own,
    recv,
    terms,
    row_in_part,
    recv_stride,
    c,
    c_row,
    rows,
    c_stride,
    col,
    end,
    bias,
    has_bias,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TERMS: tl.constexpr,
    OWN_AT: tl.constexpr,
    BEGUN: tl.constexpr,
):
    """Run `store_sum` for some columns. has_bias: 0 if there is no bias."""
    row = tl.arange(0, ROWS)
    c_col = col + tl.arange(0, COLS)
    c_at = c + (c_row + row).to(tl.int64)[:, None] * c_stride + c_col[None, :]
    inside = (row < rows)[:, None] & (c_col < end)[None, :]
    product = own
    if BEGUN:
        product += tl.load(c_at, mask=inside, other=0).to(tl.float32)
    total = product if OWN_AT == 0 else tl.zeros((ROWS, COLS), tl.float32)
    for i in tl.static_range(TERMS):
        first = tl.load(terms + i * TERM_FIELDS + TERM_ROW) + row_in_part
        at = recv + (first + row).to(tl.int64)[:, None] * recv_stride + c_col[None, :]
        total += tl.load(at, mask=inside, other=0).to(tl.float32)
        if i + 1 == OWN_AT:
            total += product
    wanted = (c_col < end) & (has_bias != 0)
    term = tl.load(bias + c_col, mask=wanted, other=0)
    total += term.to(tl.float32)[None, :]
    tl.store(c_at, total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def store_sum(  # noqa: PLR0913
    own,
    recv,
    terms,
    row_in_part,
    recv_stride,
    c,
    c_row,
    rows,
    c_stride,
    col,
    end,
    bias,
    has_bias,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TERMS: tl.constexpr,
    OWN_AT: tl.constexpr,
    BEGUN: tl.constexpr,
):
    """Store `rows` rows of a tile's sum with the rows of `recv` that `terms` names (+ bias).

    own: the product of the tile, float32; row_in_part: its first row in its part; terms: pointer to
    the part's TERMS rows of the table of terms, with OWN_AT of them before the product; col, end:
    its first column in c and in recv, and the one past the last; BEGUN: whether the product
    accumulates into c.
    """
    WIDTH: tl.constexpr = COLS // 4  # noqa: N806
    for i in tl.static_range(4):
        store_columns(
            quarter(own, i, ROWS, COLS), recv, terms, row_in_part, recv_stride, c, c_row,
            rows, c_stride, col + i * WIDTH, end, bias, has_bias,
            ROWS, WIDTH, TERMS, OWN_AT, BEGUN,
        )  # fmt: skip
