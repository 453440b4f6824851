"""Split-k: tiles that several programs multiply, each a slice of the depth. Device code only.

The last tiles of a launch rarely fill a round over all programs. If at least half of the programs
would be idle, each tile is divided among `among` programs:

    program   0                            1                            2             ...
    tile 0    front -> scratch, counted    end, + scratch, stored
    tile 1                                                              front -> ...

The program with a tile's end waits for the slices of the programs before it. Those have smaller
numbers, so they have started before it, and wait for no other program: a launch ends even if few
programs run at a time. The end is a little longer than the other slices, because these are stored
in that time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.signals import await_if, count_tiles
from ficco.kernels.sum_epilogue import quarter, store_columns
from ficco.kernels.tile_product import (
    AWAITED,
    COLUMN,
    COLUMNS_END,
    COUNT,
    HEIGHT,
    PART,
    PLACE_FIELDS,
    RAISED,
    TARGET_ROW,
    multiplied,
    target_of,
)

__all__ = ["share_tiles"]

# Extra depth steps of an end: the time in which the other slices are stored.
_LEAD = tl.constexpr(10)


@triton.jit
def _kept(
    scratch,
    program,
    i: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Return pointers to a program's scratch for a quarter of its slice's product."""
    WIDTH: tl.constexpr = COLS // 4  # noqa: N806
    at = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return scratch + (program * 4 + i) * (ROWS * WIDTH) + at


@triton.jit
def _keep(
    total,
    scratch,
    program,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Store a slice's product by quarters, whose exchange between threads needs less memory."""
    for i in tl.static_range(4):
        tl.store(_kept(scratch, program, i, ROWS, COLS), quarter(total, i, ROWS, COLS))


@triton.jit
def _finish(  # noqa: PLR0913 - a kernel's arguments are its interface
    total,
    scratch,
    begin,
    past,
    c,
    place,
    c_stride,
    bias,
    has_bias,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BEGUN: tl.constexpr,
    COL_STEP: tl.constexpr,
):
    """Store a tile: the end's product plus the slices of programs begin to past, in that order."""
    WIDTH: tl.constexpr = COLS // 4  # noqa: N806
    col = tl.load(place + COLUMN) // COL_STEP * COL_STEP
    end = tl.load(place + COLUMNS_END) // COL_STEP * COL_STEP
    c_row = tl.load(place + TARGET_ROW)
    rows = tl.load(place + HEIGHT)
    for i in tl.static_range(4):
        part = quarter(total, i, ROWS, COLS)
        for program in tl.range(begin, past):
            part += tl.load(_kept(scratch, program, i, ROWS, COLS))
        store_columns(
            part, c, c, 0, c_stride, c, c_row, rows, c_stride, col + i * WIDTH, end, bias,
            has_bias, ROWS, WIDTH, 0, 0, BEGUN,
        )  # fmt: skip


@triton.jit
def share_tiles(  # noqa: PLR0913 - a kernel's arguments are its interface
    a,
    b,
    bias,
    c,
    partial,
    places,
    scratch,
    shares,
    words,
    counters,
    signals,
    stop,
    status,
    value,
    tiles,
    before,
    among,
    whole,
    k,
    a_stride,
    b_deep_stride,
    b_col_stride,
    has_bias,
    c_stride,
    partial_stride,
    timeout_ns,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEEP: tl.constexpr,
    A_BULK: tl.constexpr,
    B_BULK: tl.constexpr,
    B_TURNED: tl.constexpr,
    BEGUN: tl.constexpr,
    COL_STEP: tl.constexpr,
    AWAITS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Multiply this program's slice of a split tile; with the tile's end, store the tile.

    The arguments are those of the kernels: of `gated_gemm`, which AWAITS words, or of
    `pushing_gemm`, which raises them; and:

    before, tiles: the first of the split tiles that are of this source, and the end of these.
    among: programs per split tile; whole: the number of the first split tile among all tiles.
    scratch: float32 [programs, ROWS * COLS].
    shares: int32, one per split tile, all 0; they are 0 again when the launch ends.
    """
    program = tl.program_id(0)
    number = program // among
    turn = program % among
    ends = turn == among - 1
    if (number >= before) & (number < tiles):
        place = places + (whole + number) * PLACE_FIELDS
        share = shares + number
        part = tl.load(place + PART)
        steps = tl.cdiv(k, DEEP)
        first = (steps - _LEAD) * turn // among
        past = tl.where(ends, steps, (steps - _LEAD) * (turn + 1) // among)
        came = 1
        if AWAITS:
            word = tl.load(place + AWAITED)
            came = await_if(
                word >= 0, words + word, value, stop, timeout_ns, status, part + 1, A_BULK, ON_GPU
            )
        total = multiplied(
            a, place, a_stride, b, b_deep_stride, b_col_stride, first, past, k,
            ROWS, COLS, DEEP, A_BULK, B_BULK, B_TURNED, ON_GPU,
        )  # fmt: skip
        came = came & await_if(
            ends, share, among - 1, stop, timeout_ns, status, part + 1, False, ON_GPU
        )
        total = tl.where(came != 0, total, float("nan"))
        if not ends:
            _keep(total, scratch, program, ROWS, COLS)
            count_tiles(share, 1, among, share, ON_GPU)  # the count never reaches `among`
        else:
            target, stride, biased = target_of(
                place, c, c_stride, partial, partial_stride, has_bias
            )
            _finish(
                total, scratch, program - turn, program, target, place, stride, bias, biased,
                ROWS, COLS, BEGUN, COL_STEP,
            )  # fmt: skip
            # An addition: the result is 0 even if others count after this program gave up.
            tl.atomic_add(share, 1 - among, sem="relaxed", scope="gpu")
            if not AWAITS:
                word = tl.load(place + RAISED)
                told = tl.where(word >= 0, 1, 0)
                count_tiles(counters + part, told, tl.load(place + COUNT), signals + word, ON_GPU)
