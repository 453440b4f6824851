"""The gated GEMM's device code: persistent programs over the tiles of parts, in order.

A tile belongs to one part; tiles of own parts come first. Programs of a launch of P:

    program p   own tiles p, p+P, ... | part 0's word, its tiles | part 1's word, its tiles | ...

Two loops over one tile counter, so that the loop over k knows its source when it is compiled. They
must be neither flattened nor spread over specialized warps: loads would move ahead of the wait.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.acquiring import await_word
from ficco.kernels.tile_product import (
    A_ROW,
    C_ROW,
    PART_ROWS,
    WORD,
    entry_of,
    find_part,
    multiplied,
    place_in,
    store,
)

__all__ = ["UNSPECIALIZED", "gated_gemm"]

# The compiler learns nothing about these, so they never make another kernel.
UNSPECIALIZED = ("words", "stop", "status", "value", "own_tiles", "tiles", "timeout_ns")


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gated_gemm(  # noqa: PLR0913
    own,
    window,
    b,
    bias,
    c,
    table,
    words,
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
    timeout_ns: tl.int64,
    ROWS: tl.constexpr,  # noqa: N803 - Triton's way to mark constants
    COLS: tl.constexpr,  # noqa: N803
    DEEP: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    OWN_BULK: tl.constexpr,  # noqa: N803
    WINDOW_BULK: tl.constexpr,  # noqa: N803
    B_BULK: tl.constexpr,  # noqa: N803
    B_TURNED: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    ON_GPU: tl.constexpr,  # noqa: N803
):
    """Store every part's rows of a.b (+ bias) in c.

    own, window, b: descriptors, if their _BULK is set, of blocks of ROWS x DEEP, and DEEP x COLS (
    turned round if B_TURNED); else pointers, with their strides in elements.
    table: of parts, see `tile_product`.
    words, stop, status: pointers to int32; value: what words are awaited to be; timeout_ns: how
    long a program waits before it gives up.
    own_tiles, tiles: tiles of own parts, and of all; n, k: columns of c, and depth.
    ON_GPU: False in Triton's interpreter.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    part = 0
    for tile in tl.range(program, own_tiles, programs):
        part = find_part(table, part, tile)
        entry = entry_of(table, part)
        row, col = place_in(entry, tile, n, ROWS, COLS, GROUP)
        rows = tl.load(entry + PART_ROWS) - row
        total = multiplied(
            own, tl.load(entry + A_ROW) + row, rows, own_stride,
            b, col, n, b_deep_stride, b_col_stride, k,
            ROWS, COLS, DEEP, OWN_BULK, B_BULK, B_TURNED, ON_GPU,
        )  # fmt: skip
        store(
            total, c, tl.load(entry + C_ROW) + row, rows, c_stride, col, n, bias, bias_stride,
            ROWS, COLS, HAS_BIAS,
        )  # fmt: skip

    # The same over the window. A program awaits a part's word once, before its first tile of it,
    # and after it has given one up it only looks at others. What it cannot know it multiplies all
    # the same, and stores NaN: a k loop that may not run is compiled to worse code.
    begin = program + tl.cdiv(tl.maximum(own_tiles - program, 0), programs) * programs
    acquired = -1
    came = 1
    patience_ns = timeout_ns
    for tile in tl.range(begin, tiles, programs):
        part = find_part(table, part, tile)
        entry = entry_of(table, part)
        row, col = place_in(entry, tile, n, ROWS, COLS, GROUP)
        if part != acquired:
            acquired = part
            came = 1
            word = tl.load(entry + WORD)
            if word >= 0:
                came = await_word(words + word, value, stop, patience_ns, WINDOW_BULK, ON_GPU)
                if came == 0:
                    tl.atomic_max(status, part + 1, sem="relaxed", scope="sys")
                    patience_ns = tl.zeros_like(patience_ns)
        rows = tl.load(entry + PART_ROWS) - row
        total = multiplied(
            window, tl.load(entry + A_ROW) + row, rows, window_stride,
            b, col, n, b_deep_stride, b_col_stride, k,
            ROWS, COLS, DEEP, WINDOW_BULK, B_BULK, B_TURNED, ON_GPU,
        )  # fmt: skip
        c_row = tl.load(entry + C_ROW) + row
        if came != 0:
            store(total, c, c_row, rows, c_stride, col, n, bias, bias_stride, ROWS, COLS, HAS_BIAS)
        else:
            spoilt = tl.full((ROWS, COLS), float("nan"), tl.float32)
            store(spoilt, c, c_row, rows, c_stride, col, n, bias, 0, ROWS, COLS, False)
