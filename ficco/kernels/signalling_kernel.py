"""The signalling GEMM's device code: the gated GEMM, whose parts also tell when they are stored.

Beside what the gated kernel does, a part may be a slice of the columns, may go to one of two
targets, and may be summed with what peers have made of it before it is rounded:

    peers' parts, in the order in which they are pushed | own parts, summed with what has landed
    tiles are stored and counted, the last raises a word  | words awaited after the product

Where parts wait for words, programs take tiles from a shared counter: a program that waits then
holds back no tile that peers wait for, even if other programs have not started. So
loops over tiles have no range, and are not merged with those over k; nor may they be spread over
specialized warps, which do not meet at the barrier of a wait.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.acquiring import await_word
from ficco.kernels.gated_kernel import UNSPECIALIZED
from ficco.kernels.landed_sum import TERM_FIELDS, TERM_WORD, store_sum
from ficco.kernels.releasing import count_tile
from ficco.kernels.tile_product import (
    A_ROW,
    C_ROW,
    FIRST,
    PART_ROWS,
    WORD,
    entry_of,
    find_part,
    place_in,
    product,
    store,
)

__all__ = ["signalling_gemm"]

# Fields of the second table's rows.
_SIGNAL = tl.constexpr(0)
_COL = tl.constexpr(1)
_COLS = tl.constexpr(2)
_TARGET = tl.constexpr(3)
_SUMMED = tl.constexpr(4)
_FIELDS = tl.constexpr(5)


@triton.jit
def _next_tile(
    taken,
    tile,
    tiles,
    COUNTED: tl.constexpr,  # noqa: N803 - Triton's way to mark constants
):
    """Return the tile that this program multiplies after `tile`.

    Every program takes one number too many. The one that takes the last of all clears the counter.
    """
    if COUNTED:
        programs = tl.num_programs(0)
        tile = tl.atomic_add(taken, 1, sem="relaxed", scope="gpu")
        if tile == tiles + programs - 1:
            tl.atomic_xchg(taken, 0, sem="relaxed", scope="gpu")
    else:
        tile += tl.num_programs(0)
    return tile


@triton.jit
def _place(  # noqa: PLR0913 - a kernel's arguments are its interface
    table,
    extras,
    part,
    tile,
    n,
    SLICE_STEP: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
):
    """Return a tile's part, its row there, its rows, its column, and the end of the columns."""
    part = find_part(table, part, tile)
    entry = entry_of(table, part)
    if SLICE_STEP:
        extra = extras + part * _FIELDS
        left = tl.multiple_of(tl.load(extra + _COL), SLICE_STEP)
        width = tl.multiple_of(tl.load(extra + _COLS), SLICE_STEP)
    else:
        left = 0
        width = n
    row, col = place_in(entry, tile, width, ROWS, COLS, GROUP)
    return part, row, tl.load(entry + PART_ROWS) - row, left + col, left + width


@triton.jit
def _await(  # noqa: PLR0913
    word,
    words,
    value,
    stop,
    status,
    part,
    patience_ns,
    FENCED: tl.constexpr,  # noqa: N803
    ON_GPU: tl.constexpr,  # noqa: N803
):
    """Return whether a part's word came, 0 or 1, and the patience for later ones."""
    came = 1
    if word >= 0:
        here = await_word(words + word, value, stop, patience_ns, FENCED, ON_GPU)
        if here == 0:
            tl.atomic_max(status, part + 1, sem="relaxed", scope="sys")
            patience_ns = tl.zeros_like(patience_ns)
        came = here
    return came, patience_ns


@triton.jit
def _count(
    table,
    extra,
    part,
    counters,
    signals,
    ON_GPU: tl.constexpr,  # noqa: N803
):
    """Count a stored tile of a part, if the part has a word to raise."""
    word = tl.load(extra + _SIGNAL)
    if word >= 0:
        first = tl.load(entry_of(table, part) + FIRST)
        most = tl.load(entry_of(table, part + 1) + FIRST) - first - 1
        count_tile(counters + part, most, signals + word, ON_GPU)


@triton.jit
def _store(  # noqa: PLR0913
    total,
    c,
    c_row,
    rows,
    c_stride,
    col,
    end,
    bias,
    bias_stride,
    ROWS: tl.constexpr,  # noqa: N803
    COLS: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    BEGUN: tl.constexpr,  # noqa: N803
):
    """Store a tile, or add it to what is there."""
    if BEGUN:
        store_sum(
            total, c, bias, 0, c_stride, c, c_row, rows, c_stride, col, end, bias, bias_stride,
            ROWS, COLS, HAS_BIAS, 0, 0, True,
        )  # fmt: skip
    else:
        store(total, c, c_row, rows, c_stride, col, end, bias, bias_stride, ROWS, COLS, HAS_BIAS)


@triton.jit
def _store_in_target(  # noqa: PLR0913
    total,
    entry,
    extra,
    row,
    rows,
    col,
    end,
    c,
    c_stride,
    partial,
    partial_stride,
    bias,
    bias_stride,
    ROWS: tl.constexpr,  # noqa: N803
    COLS: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    HAS_PARTIAL: tl.constexpr,  # noqa: N803
    BEGUN: tl.constexpr,  # noqa: N803
):
    """Store a tile in its part's target. The bias is for c alone: partial is a term of a sum."""
    c_row = tl.load(entry + C_ROW) + row
    away = False
    if HAS_PARTIAL:
        away = tl.load(extra + _TARGET) != 0
    if away:
        _store(
            total, partial, c_row, rows, partial_stride, col, end, bias, 0,
            ROWS, COLS, False, BEGUN,
        )  # fmt: skip
    else:
        _store(
            total, c, c_row, rows, c_stride, col, end, bias, bias_stride,
            ROWS, COLS, HAS_BIAS, BEGUN,
        )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def signalling_gemm(  # noqa: PLR0913
    own,
    window,
    b,
    bias,
    c,
    partial,
    landing,
    table,
    extras,
    terms,
    counters,
    words,
    signals,
    stop,
    status,
    value: tl.int32,
    own_tiles: tl.int32,
    tiles: tl.int32,
    n,
    k,
    own_stride: tl.int64,
    window_stride: tl.int64,
    b_deep_stride,
    b_col_stride,
    bias_stride,
    c_stride: tl.int64,
    partial_stride: tl.int64,
    landing_stride: tl.int64,
    timeout_ns: tl.int64,
    ROWS: tl.constexpr,  # noqa: N803
    COLS: tl.constexpr,  # noqa: N803
    DEEP: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    OWN_BULK: tl.constexpr,  # noqa: N803
    WINDOW_BULK: tl.constexpr,  # noqa: N803
    B_BULK: tl.constexpr,  # noqa: N803
    B_TURNED: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    ON_GPU: tl.constexpr,  # noqa: N803
    HAS_OWN: tl.constexpr,  # noqa: N803
    HAS_WINDOW: tl.constexpr,  # noqa: N803
    HAS_PARTIAL: tl.constexpr,  # noqa: N803
    SLICE_STEP: tl.constexpr,  # noqa: N803
    TERMS: tl.constexpr,  # noqa: N803
    OWN_AT: tl.constexpr,  # noqa: N803
    COUNTED: tl.constexpr,  # noqa: N803
    BEGUN: tl.constexpr,  # noqa: N803
):
    """Store every part's rows and columns of a.b in its target, and raise the part's word.

    The arguments of `gated_gemm`, and:

    partial: where parts of the second target go; landing: rows that peers have made. Both are
    pointers, with their strides in elements.
    extras: int32 [parts, 5]. A row holds the index of the word that a part raises or -1, its first
    column, its columns, 1 where its target is `partial`, and 1 where it is summed.
    terms: int32 [parts, TERMS, 2]: a term's first row in landing, and its word or -1.
    counters: int32 [1 + parts], all 0: tiles taken, and a part's tiles that are stored; they are 0
    again when the launch ends.
    signals: pointer to int32.
    HAS_OWN, HAS_WINDOW, HAS_PARTIAL: whether there are parts of that source, or that target.
    SLICE_STEP: 0 if parts have all columns, else what divides their first columns and widths.
    TERMS, OWN_AT: how many terms are added to a summed part, and how many of them before the own.
    COUNTED: whether tiles are taken from the shared counter.
    BEGUN: whether parts are added to what their targets hold.
    """
    taken = counters
    part_counts = counters + 1
    tile = tl.program_id(0)
    if COUNTED:
        tile = _next_tile(taken, tile, tiles, COUNTED)
    part = 0
    acquired = -1
    came = 1
    patience_ns = timeout_ns
    if HAS_OWN:
        while tile < own_tiles:
            # Taken early, so that the counter's answer arrives during the product.
            following = _next_tile(taken, tile, tiles, COUNTED)
            part, row, rows, col, end = _place(
                table, extras, part, tile, n, SLICE_STEP, ROWS, COLS, GROUP
            )  # fmt: skip
            entry = entry_of(table, part)
            extra = extras + part * _FIELDS
            total = product(
                own, tl.load(entry + A_ROW) + row, rows, own_stride,
                b, col, n, b_deep_stride, b_col_stride, k,
                ROWS, COLS, DEEP, OWN_BULK, B_BULK, B_TURNED, ON_GPU,
            )  # fmt: skip
            summed = False
            if TERMS:
                summed = tl.load(extra + _SUMMED) != 0
            if summed:
                at_terms = terms + part * (TERMS * TERM_FIELDS)
                if part != acquired:  # behind a product: peers have had that time
                    acquired = part
                    came = 1
                    for i in tl.range(TERMS):
                        word = tl.load(at_terms + i * TERM_FIELDS + TERM_WORD)
                        here, patience_ns = _await(
                            word, words, value, stop, status, part, patience_ns, False, ON_GPU
                        )  # fmt: skip
                        came = came & here
                store_sum(
                    tl.where(came != 0, total, float("nan")), landing, at_terms, row,
                    landing_stride, c, tl.load(entry + C_ROW) + row, rows, c_stride, col, end,
                    bias, bias_stride, ROWS, COLS, HAS_BIAS, TERMS, OWN_AT, BEGUN,
                )  # fmt: skip
            else:
                _store_in_target(
                    total, entry, extra, row, rows, col, end, c, c_stride, partial,
                    partial_stride, bias, bias_stride, ROWS, COLS, HAS_BIAS, HAS_PARTIAL, BEGUN,
                )  # fmt: skip
            _count(table, extra, part, part_counts, signals, ON_GPU)
            tile = following

    if HAS_WINDOW:
        while tile < tiles:
            following = _next_tile(taken, tile, tiles, COUNTED)
            part, row, rows, col, end = _place(
                table, extras, part, tile, n, SLICE_STEP, ROWS, COLS, GROUP
            )  # fmt: skip
            entry = entry_of(table, part)
            extra = extras + part * _FIELDS
            if part != acquired:
                acquired = part
                came, patience_ns = _await(
                    tl.load(entry + WORD), words, value, stop, status, part, patience_ns,
                    WINDOW_BULK, ON_GPU,
                )  # fmt: skip
            total = product(
                window, tl.load(entry + A_ROW) + row, rows, window_stride,
                b, col, n, b_deep_stride, b_col_stride, k,
                ROWS, COLS, DEEP, WINDOW_BULK, B_BULK, B_TURNED, ON_GPU,
            )  # fmt: skip
            _store_in_target(
                tl.where(came != 0, total, float("nan")), entry, extra, row, rows, col, end, c,
                c_stride, partial, partial_stride, bias, bias_stride,
                ROWS, COLS, HAS_BIAS, HAS_PARTIAL, BEGUN,
            )  # fmt: skip
            _count(table, extra, part, part_counts, signals, ON_GPU)
            tile = following
