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

__all__ = ["UNSPECIALIZED", "gated_gemm"]

# Fields of the table's rows.
_A_ROW = tl.constexpr(0)
_C_ROW = tl.constexpr(1)
_ROWS = tl.constexpr(2)
_WORD = tl.constexpr(3)
_FIRST = tl.constexpr(4)
_FIELDS = tl.constexpr(5)


@triton.jit
def _place(
    table,
    part,
    tile,
    n,
    ROWS: tl.constexpr,  # noqa: N803 - Triton's way to mark constants
    COLS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
):
    """Return the part that a tile belongs to, its first row in it, and its first column."""
    while tile >= tl.load(table + (part + 1) * _FIELDS + _FIRST):
        part += 1
    entry = table + part * _FIELDS
    number = tile - tl.load(entry + _FIRST)
    columns = tl.cdiv(n, COLS)
    top = number // (GROUP * columns) * GROUP
    height = tl.minimum(tl.cdiv(tl.load(entry + _ROWS), ROWS) - top, GROUP)
    number %= GROUP * columns
    return part, (top + number % height) * ROWS, number // height * COLS


@triton.jit
def _multiplied(  # noqa: PLR0913 - a kernel's arguments are its interface
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
def _store(  # noqa: PLR0913
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


# The compiler learns nothing about these, so they never make another kernel.
UNSPECIALIZED = ("value", "own_tiles", "tiles", "timeout_ns")


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
):
    """Store every part's rows of a.b (+ bias) in c.

    own, window, b: descriptors, if their _BULK is set, of blocks of ROWS x DEEP, and DEEP x COLS (
    turned round if B_TURNED); else pointers, with their strides in elements.
    table: int32 [parts + 1, 5]. A row holds a part's first row in its source and in c, its rows,
    the index of its word or -1, and its first tile; the last row ends the tiles.
    words, stop, status: pointers to int32; value: what words are awaited to be; timeout_ns: how
    long a program waits before it gives up.
    own_tiles, tiles: tiles of own parts, and of all; n, k: columns of c, and depth.
    ON_GPU: False in Triton's interpreter.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    part = 0
    for tile in tl.range(program, own_tiles, programs):
        part, row, col = _place(table, part, tile, n, ROWS, COLS, GROUP)
        entry = table + part * _FIELDS
        rows = tl.load(entry + _ROWS) - row
        total = _multiplied(
            own, tl.load(entry + _A_ROW) + row, rows, own_stride,
            b, col, n, b_deep_stride, b_col_stride, k,
            ROWS, COLS, DEEP, OWN_BULK, B_BULK, B_TURNED, ON_GPU,
        )  # fmt: skip
        _store(
            total, c, tl.load(entry + _C_ROW) + row, rows, c_stride, col, n, bias, bias_stride,
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
        part, row, col = _place(table, part, tile, n, ROWS, COLS, GROUP)
        entry = table + part * _FIELDS
        if part != acquired:
            acquired = part
            came = 1
            word = tl.load(entry + _WORD)
            if word >= 0:
                came = await_word(words + word, value, stop, patience_ns, WINDOW_BULK, ON_GPU)
                if came == 0:
                    tl.atomic_max(status, part + 1, sem="relaxed", scope="sys")
                    patience_ns = tl.zeros_like(patience_ns)
        rows = tl.load(entry + _ROWS) - row
        total = _multiplied(
            window, tl.load(entry + _A_ROW) + row, rows, window_stride,
            b, col, n, b_deep_stride, b_col_stride, k,
            ROWS, COLS, DEEP, WINDOW_BULK, B_BULK, B_TURNED, ON_GPU,
        )  # fmt: skip
        c_row = tl.load(entry + _C_ROW) + row
        if came != 0:
            _store(total, c, c_row, rows, c_stride, col, n, bias, bias_stride, ROWS, COLS, HAS_BIAS)
        else:
            spoilt = tl.full((ROWS, COLS), float("nan"), tl.float32)
            _store(spoilt, c, c_row, rows, c_stride, col, n, bias, 0, ROWS, COLS, False)
