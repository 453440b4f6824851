"""Gradients of the experts' weights: products over the rows of each expert. Device code only."""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import EXPERTS_GRADIENT
from ficco.kernels.experts_product_kernel import indexed_rows, rows_of
from ficco.kernels.sum_epilogue import halves


@triton.jit
def _tile(  # noqa: PLR0913 - a kernel's arguments are its interface
    own, gathered, row, slot, inside, col, topk, own_begin, own_end, stride, width,
    INDEXED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return BLOCK columns of some rows of the list; rows and columns that there are not are 0."""
    if INDEXED:
        rows = indexed_rows(own, gathered, slot, topk, own_begin, own_end, stride, width)
    else:
        rows = own + row.to(tl.int64) * stride
    cols = col + tl.arange(0, BLOCK)
    mask = inside[:, None] & (cols < width)[None, :]
    return tl.load(rows[:, None] + cols[None, :], mask=mask, other=0)


@triton.jit(do_not_specialize=EXPERTS_GRADIENT.unknown)
def experts_gradient(  # noqa: PLR0913
    a, a_gathered, b, b_gathered, dw, routing,
    list_at: tl.int32, experts: tl.int32, topk: tl.int32, capacity: tl.int32,
    own_begin: tl.int32, own_end: tl.int32,
    a_width: tl.int32, b_width: tl.int32, a_stride: tl.int64, b_stride: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PANEL: tl.constexpr,
    A_INDEXED: tl.constexpr, B_INDEXED: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Store the sum over an expert's rows of a's row times b's row, for each expert.

    a, b: rows in the order of the list, or, with A_INDEXED or B_INDEXED, rows of own tokens; those
        of other tokens are then in a_gathered or b_gathered, [tokens, width].
    dw: [experts, a_width, b_width].
    routing, list_at, topk, own_begin, own_end: as of `experts_product`.
    capacity: rows of the list from there on are not read.
    The program's number is that of a tile: expert by expert.
    """
    down, across = tl.cdiv(a_width, BLOCK_M), tl.cdiv(b_width, BLOCK_N)
    group = tl.program_id(0) // (down * across)
    number = tl.program_id(0) % (down * across)
    panel = number // (PANEL * across) * PANEL
    height = tl.minimum(down - panel, PANEL)
    in_panel = number - panel * across
    a_col = (panel + in_panel % height) * BLOCK_M
    b_col = in_panel // height * BLOCK_N
    first, last = rows_of(routing, group, experts, 0)
    last = tl.minimum(last, capacity)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in tl.range(first, last, BLOCK_K):
        row = begin + tl.arange(0, BLOCK_K)
        inside = row < last
        slot = row
        if A_INDEXED or B_INDEXED:
            slot = tl.load(routing + list_at + row, mask=inside, other=0)
        a_tile = _tile(
            a, a_gathered, row, slot, inside, a_col, topk, own_begin, own_end, a_stride, a_width,
            A_INDEXED, BLOCK_M,
        )  # fmt: skip
        b_tile = _tile(
            b, b_gathered, row, slot, inside, b_col, topk, own_begin, own_end, b_stride, b_width,
            B_INDEXED, BLOCK_N,
        )  # fmt: skip
        if not ON_GPU:  # the interpreter multiplies bfloat16 as integers
            a_tile = a_tile.to(tl.float32)
            b_tile = b_tile.to(tl.float32)
        total = tl.dot(tl.trans(a_tile), b_tile, total, input_precision="ieee")
    row = a_col + tl.arange(0, BLOCK_M)
    at = dw + (group.to(tl.int64) * a_width + row)[:, None] * b_width
    left, right = halves(total, BLOCK_M, BLOCK_N)  # their exchange needs half the memory
    for i in tl.static_range(2):
        cols = b_col + i * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        part = left if i == 0 else right
        mask = (row < a_width)[:, None] & (cols < b_width)[None, :]
        tl.store(at + cols[None, :], part.to(dw.dtype.element_ty), mask=mask)
