"""The product of one-kernel calls: few rows at separate addresses by columns of a weight.

Device code only. Loops must be neither flattened nor warp-specialized: loads would move ahead of
waits.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["product"]


@triton.jit
def product(  # noqa: PLR0913 - a kernel's arguments are its interface
    x_rows,
    in_x,
    w,
    left,
    right,
    begin,
    end,
    w_deep_stride,
    w_col_stride,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEEP: tl.constexpr,
    STAGES: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Return the float32 product of rows and w's columns [left, right), over depths [begin, end).

    Elements outside are undefined.

    x_rows: pointers to the rows, [ROWS, 1]; a scalar if ROWS is 1.
    in_x: mask of the rows, of the same shape; not used if ROWS is 1.
    left, right: at most COLS columns are multiplied. begin is a multiple of DEEP.
    TURNED: 0, elements of a row of w are adjacent; 1, elements of a column; 2, neither. A stride
    that is thereby 1 is not read.
    ROWS, COLS, DEEP, STAGES: see `one_kernel_all_reduce.OneKernelTile`.
    """
    deep = tl.arange(0, DEEP)
    col = left + tl.arange(0, COLS)
    in_w = col < right
    # A stride of 1 is explicit, so that the compiler knows which elements are adjacent.
    w_cols = col.to(tl.int64) if TURNED == 0 else col.to(tl.int64) * w_col_stride
    if ROWS == 1:  # columns of w are the rows of the tile, as in memory
        w_at = w + w_cols[:, None]
        x_at = x_rows + deep
        sums = tl.zeros((COLS, DEEP), tl.float32)
        for step in tl.range(0, tl.cdiv(end - begin, DEEP), num_stages=STAGES):
            at = begin + step * DEEP
            in_k = deep < end - at
            x_row = tl.load(x_at + at, mask=in_k, other=0)
            w_deep = (at + deep).to(tl.int64)[None, :]
            if TURNED != 1:
                w_deep = w_deep * w_deep_stride
            w_tile = tl.load(w_at + w_deep, mask=in_w[:, None] & in_k[None, :], other=0)
            sums += w_tile.to(tl.float32) * x_row.to(tl.float32)[None, :]
        total = tl.sum(sums, 1)[None, :]
    else:
        x_at = x_rows + deep[None, :]
        w_at = w + w_cols[None, :]
        total = tl.zeros((ROWS, COLS), tl.float32)
        for step in tl.range(0, tl.cdiv(end - begin, DEEP), num_stages=STAGES):
            at = begin + step * DEEP
            in_k = deep < end - at
            x_tile = tl.load(x_at + at, mask=in_x & in_k[None, :], other=0)
            w_deep = (at + deep).to(tl.int64)[:, None]
            if TURNED != 1:
                w_deep = w_deep * w_deep_stride
            w_tile = tl.load(w_at + w_deep, mask=in_w[None, :] & in_k[:, None], other=0)
            if not ON_GPU:  # the interpreter multiplies bfloat16 as integers
                x_tile = x_tile.to(tl.float32)
                w_tile = w_tile.to(tl.float32)
            total = tl.dot(x_tile, w_tile, total, input_precision="ieee")
    return total
