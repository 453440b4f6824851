"""Products of the rows of a rank's experts with the experts' weights. Device code only.

The rows are those of a list, see `ficco.kernels.experts`: expert by expert. A persistent launch
finds its tiles on the device, from the ends of the experts' rows. Tiles are in the order of
experts. Inside an expert, PANEL tiles of rows take the same columns of the weight one after
another, so that these columns come from L2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import EXPERTS_PRODUCT
from ficco.kernels.sum_epilogue import halves

_HEADER = tl.constexpr(4)  # as in `operators.routing`
_OWN, _OTHERS = tl.constexpr(1), tl.constexpr(2)  # waves


@triton.jit
def rows_of(routing, group, experts, wave):
    """Return the first row of an expert in a wave, and the end of its rows."""
    ends = routing + _HEADER
    before = tl.load(ends + group - 1, mask=group > 0, other=0)
    own_end = tl.load(ends + experts + group)
    first = tl.where(wave == _OTHERS, own_end, before)
    return first, tl.where(wave == _OWN, own_end, tl.load(ends + group))


@triton.jit
def _rows_of(routing, group, experts, wave, capacity, RETURN: tl.constexpr):
    """Return the first row and the end of a group's rows.

    The group after the last expert has the rows of y that no expert has.
    """
    expert = tl.minimum(group, experts - 1)
    first, last = rows_of(routing, expert, experts, wave)
    if not RETURN:
        is_expert = group < experts
        first = tl.minimum(tl.where(is_expert, first, tl.load(routing)), capacity)
        last = tl.minimum(tl.where(is_expert, last, capacity), capacity)
        last = tl.where(is_expert | (wave != _OWN), last, first)
    return first, last


@triton.jit
def indexed_rows(x, gathered, slot, topk, own_begin, own_end, x_stride, d):
    """Return pointers to the rows of the tokens of some slots."""
    token = slot // topk
    is_own = (token >= own_begin) & (token < own_end)
    own = x + (token - own_begin).to(tl.int64) * x_stride
    return tl.where(is_own, own, gathered + token.to(tl.int64) * d)


@triton.jit
def _product(  # noqa: PLR0913 - a kernel's arguments are its interface
    rows, inside, w, w_first, col, steps, d, n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    W_BULK: tl.constexpr, W_TURNED: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Return the float32 product of some rows with BLOCK_N columns of an expert's weight.

    rows: [BLOCK_M], pointers; inside: whether there is such a row, else it is 0.
    w_first: the first row of the weight among those of all experts. With W_BULK, BLOCK_K divides d.
    """
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    deep = tl.arange(0, BLOCK_K)
    at_rows = rows[:, None] + deep[None, :]
    cols = col + tl.arange(0, BLOCK_N)
    for step in tl.range(0, steps):
        at = step * BLOCK_K
        if W_BULK:
            x_tile = tl.load(at_rows + at, mask=inside[:, None], other=0)
            if W_TURNED:  # noqa: SIM108 - Triton's way
                w_tile = w.load([w_first + col, at]).T
            else:
                w_tile = w.load([w_first + at, col])
        else:
            is_deep = deep < d - at
            x_tile = tl.load(at_rows + at, mask=inside[:, None] & is_deep[None, :], other=0)
            is_in_w = is_deep[:, None] & (cols < n)[None, :]
            if W_TURNED:
                at_w = (w_first + cols).to(tl.int64)[None, :] * d + (at + deep)[:, None]
            else:
                at_w = (w_first + at + deep).to(tl.int64)[:, None] * n + cols[None, :]
            w_tile = tl.load(w + at_w, mask=is_in_w, other=0)
        if not ON_GPU:  # the interpreter multiplies bfloat16 as integers
            x_tile = x_tile.to(tl.float32)
            w_tile = w_tile.to(tl.float32)
        total = tl.dot(x_tile, w_tile, total, input_precision="ieee")
    return total


@triton.jit
def _return_rows(  # noqa: PLR0913
    slot, inside, windows, bases, copy, rank, topk, searches, world, n, y,
):  # fmt: skip
    """Return pointers to the rows of some slots in the windows of the tokens' owners; y is own."""
    token = slot // topk
    owner, past = tl.zeros_like(slot), tl.zeros_like(slot) + world
    for _ in tl.range(0, searches):  # for the last rank whose tokens begin at this one or before
        middle = (owner + past) // 2
        is_before = tl.load(bases + middle, mask=inside, other=0) <= token
        owner = tl.where(is_before, middle, owner)
        past = tl.where(is_before, past, middle)
    is_peer = inside & (owner != rank)
    peer = tl.load(windows + copy * world + owner, mask=is_peer, other=0)
    window = tl.where(is_peer, peer, y.to(tl.int64)).to(y.dtype)
    row = slot - tl.load(bases + owner, mask=inside, other=0) * topk
    return tl.multiple_of(window, 16) + row.to(tl.int64) * n


@triton.jit
def _store(product, rows, inside, col, n, y, BLOCK_N: tl.constexpr):
    """Store columns of some rows, which pointers are for."""
    cols = col + tl.arange(0, BLOCK_N)
    mask = inside[:, None] & (cols < n)[None, :]
    tl.store(rows[:, None] + cols[None, :], product.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=EXPERTS_PRODUCT.unknown)
def experts_product(  # noqa: PLR0913
    x, gathered, w, y, routing, windows, bases,
    list_at: tl.int32, experts: tl.int32, topk: tl.int32, wave: tl.int32, capacity: tl.int32,
    own_begin: tl.int32, own_end: tl.int32, copy: tl.int32, rank: tl.int32, world: tl.int32,
    searches: tl.int32,
    d: tl.int32, n: tl.int32, x_stride: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PANEL: tl.constexpr,
    RETURN: tl.constexpr, W_BULK: tl.constexpr, W_TURNED: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Multiply the rows of the list by the weights of their experts.

    Without RETURN, row i of y is the row of the token of slot i times the weight of i's expert.
    With RETURN, row i of x is multiplied, and stored at the row of slot i in the window of the
    owner of the token.

    x: rows of this rank's tokens, or, with RETURN, [capacity, d] in the order of the list.
    gathered: [tokens, d], rows of all tokens; those of own tokens are not read.
    w: descriptor of a matrix or pointer: [experts x d, n], or [experts x n, d] if W_TURNED.
    y: [capacity, n]; with RETURN this rank's own window.
    routing: int32; list_at: the place of the list in it.
    windows, bases: int64 [copies x world], addresses of the windows, of which that of this rank is
        not read; int32 [world + 1], the first token of each rank. They are read only with RETURN.
    topk: slots of a token.
    wave: 0, all rows; 1, rows of own tokens; 2, those of others; 3, none. In waves 0 and 2, rows of
        y that no expert has become 0.
    capacity: rows of y that are stored, or of x that are read. With RETURN, rows past it are NaN.
    own_begin, own_end: this rank's tokens.
    copy, rank: the copy of the windows, and this rank.
    searches: 2^searches is world or more.
    d, n: depth and columns. x_stride: elements from row to row of x.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    across = tl.cdiv(n, BLOCK_N)
    groups = experts
    if not RETURN:
        groups += 1
    groups = tl.where(wave > _OTHERS, 0, groups)
    before = 0  # tiles of earlier groups
    for group in tl.range(0, groups):
        first, last = _rows_of(routing, group, experts, wave, capacity, RETURN)
        down = tl.cdiv(last - first, BLOCK_M)
        tiles = down * across
        begin = (program + programs - before % programs) % programs  # tiles take turns
        # Triton 3.6 drops a carried number that only bounds of loops depend on.
        for turn in tl.range(0, tl.cdiv(tiles - begin, programs)):
            number = begin + turn * programs
            panel = number // (PANEL * across) * PANEL
            height = tl.minimum(down - panel, PANEL)
            in_panel = number - panel * across
            row = first + (panel + in_panel % height) * BLOCK_M + tl.arange(0, BLOCK_M)
            col = in_panel // height * BLOCK_N
            inside = row < last
            steps = tl.cdiv(d, BLOCK_K)
            slot = tl.load(routing + list_at + row, mask=inside, other=0)
            if RETURN:
                there = inside & (row < capacity)
                rows = x + row.to(tl.int64) * x_stride
                steps = tl.where(tl.min(row, 0) < capacity, steps, 0)
            else:
                there = inside
                rows = indexed_rows(x, gathered, slot, topk, own_begin, own_end, x_stride, d)
                steps = tl.where(group < experts, steps, 0)
            w_first = group * n
            if not W_TURNED:
                w_first = group * d
            total = _product(
                rows, there, w, w_first, col, steps, d, n,
                BLOCK_M, BLOCK_N, BLOCK_K, W_BULK, W_TURNED, ON_GPU,
            )  # fmt: skip
            if RETURN:
                total = tl.where((row < capacity)[:, None], total, float("nan"))
                at = _return_rows(
                    slot, inside, windows, bases, copy, rank, topk, searches, world, n, y
                )  # fmt: skip
            else:
                at = y + row.to(tl.int64) * n
            left, right = halves(total, BLOCK_M, BLOCK_N)  # their exchange needs half the memory
            _store(left, at, inside, col, n, y, BLOCK_N // 2)
            _store(right, at, inside, col + BLOCK_N // 2, n, y, BLOCK_N // 2)
        before += tiles
