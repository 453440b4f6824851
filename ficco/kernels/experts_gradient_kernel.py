"""Gradients of the experts' weights: products over the rows of each expert. Device code only."""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import EXPERTS_GRADIENT, EXPERTS_ROWS
from ficco.kernels.experts_product_kernel import indexed_rows, rows_of
from ficco.kernels.sum_epilogue import halves


@triton.jit
def _tile(  # noqa: PLR0913 - a kernel's arguments are its interface
    own, gathered, bulk, begin, last, col, slots, topk, own_begin, own_end, stride, width,
    INDEXED: tl.constexpr, BULK: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Return BLOCK columns of BLOCK_K rows of the list; rows and columns that there are not are 0.

    WHOLE: whether there are all these rows.
    """
    if BULK and WHOLE:
        tile = bulk.load([begin, col])
    else:
        row = begin + tl.arange(0, BLOCK_K)
        cols = col + tl.arange(0, BLOCK)
        if INDEXED:
            slot = tl.load(slots + row, mask=row < last, other=0)
            rows = indexed_rows(own, gathered, slot, topk, own_begin, own_end, stride, width)
        else:
            rows = own + row.to(tl.int64) * stride
        mask = (cols < width)[None, :]
        if not WHOLE:
            mask = mask & (row < last)[:, None]
        tile = tl.load(rows[:, None] + cols[None, :], mask=mask, other=0)
    if not ON_GPU:  # the interpreter multiplies bfloat16 as integers
        tile = tile.to(tl.float32)
    return tile


@triton.jit(do_not_specialize=EXPERTS_GRADIENT.unknown)
def experts_gradient(  # noqa: PLR0913
    a, a_gathered, a_bulk, b, b_gathered, b_bulk, dw, routing,
    list_at: tl.int32, experts: tl.int32, topk: tl.int32, own_begin: tl.int32, own_end: tl.int32,
    capacity: tl.int32, a_width: tl.int32, b_width: tl.int32, a_stride: tl.int64,
    b_stride: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PANEL: tl.constexpr,
    A_INDEXED: tl.constexpr, B_INDEXED: tl.constexpr, A_BULK: tl.constexpr, B_BULK: tl.constexpr,
    ON_GPU: tl.constexpr,
):  # fmt: skip
    """Store the sum over an expert's rows of a's row times b's row, for each expert.

    a, b: rows in the order of the list, or, with A_INDEXED or B_INDEXED, rows of own tokens; those
        of other tokens are then in a_gathered or b_gathered, [tokens, width].
    a_bulk, b_bulk: descriptors of a and b, if A_BULK or B_BULK is set. They may be for more rows
        than there are: blocks with rows that there are not are loaded by pointers.
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
    slots = routing + list_at
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    whole = tl.maximum(last - first, 0) // BLOCK_K
    for step in tl.range(0, whole):
        begin = first + step * BLOCK_K
        a_tile = _tile(
            a, a_gathered, a_bulk, begin, last, a_col, slots, topk, own_begin, own_end, a_stride,
            a_width, A_INDEXED, A_BULK, True, BLOCK_K, BLOCK_M, ON_GPU,
        )  # fmt: skip
        b_tile = _tile(
            b, b_gathered, b_bulk, begin, last, b_col, slots, topk, own_begin, own_end, b_stride,
            b_width, B_INDEXED, B_BULK, True, BLOCK_K, BLOCK_N, ON_GPU,
        )  # fmt: skip
        total = tl.dot(tl.trans(a_tile), b_tile, total, input_precision="ieee")
    begin = first + whole * BLOCK_K
    if begin < last:
        a_tile = _tile(
            a, a_gathered, a_bulk, begin, last, a_col, slots, topk, own_begin, own_end, a_stride,
            a_width, A_INDEXED, A_BULK, False, BLOCK_K, BLOCK_M, ON_GPU,
        )  # fmt: skip
        b_tile = _tile(
            b, b_gathered, b_bulk, begin, last, b_col, slots, topk, own_begin, own_end, b_stride,
            b_width, B_INDEXED, B_BULK, False, BLOCK_K, BLOCK_N, ON_GPU,
        )  # fmt: skip
        total = tl.dot(tl.trans(a_tile), b_tile, total, input_precision="ieee")
    row = a_col + tl.arange(0, BLOCK_M)
    at = dw + (group.to(tl.int64) * a_width + row)[:, None] * b_width
    left, right = halves(total, BLOCK_M, BLOCK_N)  # their exchange needs half the memory
    for i in tl.static_range(2):
        cols = b_col + i * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        part = left if i == 0 else right
        mask = (row < a_width)[:, None] & (cols < b_width)[None, :]
        tl.store(at + cols[None, :], part.to(dw.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=EXPERTS_ROWS.unknown)
def experts_rows(  # noqa: PLR0913
    x, gathered, y, routing,
    list_at: tl.int32, experts: tl.int32, topk: tl.int32, own_begin: tl.int32, own_end: tl.int32,
    capacity: tl.int32, d: tl.int32, x_stride: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Copy the row of each slot's token to the slot's row of y, [capacity, d]; see `grouped`."""
    across = tl.cdiv(d, BLOCK_N)
    row = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < tl.minimum(tl.load(routing), capacity)
    slot = tl.load(routing + list_at + row, mask=inside, other=0)
    rows = indexed_rows(x, gathered, slot, topk, own_begin, own_end, x_stride, d)
    mask = inside[:, None] & (cols < d)[None, :]
    values = tl.load(rows[:, None] + cols[None, :], mask=mask, other=0)
    tl.store(y + row.to(tl.int64)[:, None] * d + cols[None, :], values, mask=mask)
