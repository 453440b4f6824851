"""The pushing GEMM's device code: it waits for nothing, and tells as soon as a part is stored.

    parts for peers, in the order in which they are pushed | own parts, which no peer waits for

Tiles are numbered through all parts; a table says of each where it lies, so that nothing has to be
looked for, and the loop over tiles and the one over k can be made one: what the next tile reads is
on its way while this one is stored. That would be wrong where a tile waits for its rows.

A program counts the tiles that it has stored of a part when its next one is of another part: each
count has to wait until all stores before it are done.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.gated_kernel import UNSPECIALIZED
from ficco.kernels.releasing import count_tiles
from ficco.kernels.tile_product import multiplied

__all__ = ["FIELDS", "pushing_gemm"]

FIELDS = 9  # of a tile's row in the table

_A_ROW = tl.constexpr(0)
_C_ROW = tl.constexpr(1)
_HEIGHT = tl.constexpr(2)
_COL = tl.constexpr(3)
_END = tl.constexpr(4)
_PART = tl.constexpr(5)
_WORD = tl.constexpr(6)
_COUNT = tl.constexpr(7)
_AWAY = tl.constexpr(8)
_FIELDS = tl.constexpr(FIELDS)


@triton.jit
def _store_half(  # noqa: PLR0913 - a kernel's arguments are its interface
    half,
    c,
    c_row,
    height,
    c_stride,
    col,
    end,
    bias,
    bias_stride,
    ROWS: tl.constexpr,  # noqa: N803 - Triton's way to mark constants
    COLS: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    BEGUN: tl.constexpr,  # noqa: N803
):
    """Store some columns of a tile (+ what is there) (+ bias, to which bias_stride < 0 says no)."""
    row = tl.arange(0, ROWS)
    c_col = col + tl.arange(0, COLS)
    at = c + (c_row + row).to(tl.int64)[:, None] * c_stride + c_col[None, :]
    inside = (row < height)[:, None] & (c_col < end)[None, :]
    if BEGUN:
        half += tl.load(at, mask=inside, other=0).to(tl.float32)
    if HAS_BIAS:
        wanted = (c_col < end) & (bias_stride >= 0)
        term = tl.load(bias + c_col.to(tl.int64) * bias_stride, mask=wanted, other=0)
        half += term.to(tl.float32)[None, :]
    tl.store(at, half.to(c.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def pushing_gemm(  # noqa: PLR0913
    own,
    b,
    bias,
    c,
    partial,
    places,
    counters,
    signals,
    tiles: tl.int32,
    k,
    own_stride: tl.int64,
    b_deep_stride,
    b_col_stride,
    bias_stride,
    c_stride: tl.int64,
    partial_stride: tl.int64,
    ROWS: tl.constexpr,  # noqa: N803
    COLS: tl.constexpr,  # noqa: N803
    DEEP: tl.constexpr,  # noqa: N803
    OWN_BULK: tl.constexpr,  # noqa: N803
    B_BULK: tl.constexpr,  # noqa: N803
    B_TURNED: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    HAS_PARTIAL: tl.constexpr,  # noqa: N803
    BEGUN: tl.constexpr,  # noqa: N803
    COL_STEP: tl.constexpr,  # noqa: N803
    ON_GPU: tl.constexpr,  # noqa: N803
):
    """Store every part's rows and columns of own.b in its target, and raise the part's word.

    own, b: descriptors or pointers, as those of `gated_gemm`; c, partial: pointers to one dtype,
    with their strides in elements.
    places: int32 [tiles + 1, 9]. A row holds a tile's first row in own and in its target, its rows,
    its first column, where columns of its part end, its part, the index of the word that the part
    raises or -1, how many tiles the part has, and 1 where its target is `partial`, which gets no
    bias. The last row has a part of its own.
    counters: int32, one a part, all 0; they are 0 again when the launch ends.
    signals: pointer to int32.
    tiles: how many; k: depth.
    COL_STEP: what divides where columns of tiles begin and of parts end.
    BEGUN: whether parts are added to what their targets hold.
    """
    programs = tl.num_programs(0)
    stored = 0
    for tile in tl.range(tl.program_id(0), tiles, programs, flatten=True):
        place = places + tile * _FIELDS
        height = tl.load(place + _HEIGHT)
        col = tl.load(place + _COL)
        end = tl.load(place + _END)
        total = multiplied(
            own, tl.load(place + _A_ROW), height, own_stride,
            b, col, end, b_deep_stride, b_col_stride, k,
            ROWS, COLS, DEEP, OWN_BULK, B_BULK, B_TURNED, ON_GPU,
        )  # fmt: skip
        target = c
        stride = c_stride
        step = bias_stride
        if HAS_PARTIAL:
            away = tl.load(place + _AWAY) != 0
            target = tl.where(away, partial, c)
            stride = tl.where(away, partial_stride, c_stride)
            step = tl.where(away, -1, bias_stride)
        c_row = tl.load(place + _C_ROW)
        # The compiler forgets hints on what one loop hands to the other; this it sees by itself.
        col = col // COL_STEP * COL_STEP
        end = end // COL_STEP * COL_STEP
        HALF: tl.constexpr = COLS // 2  # noqa: N806
        # By halves, which take half the room when threads exchange what they hold.
        left, right = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, HALF)), (0, 2, 1)))
        _store_half(
            left, target, c_row, height, stride, col, end, bias, step,
            ROWS, HALF, HAS_BIAS, BEGUN,
        )  # fmt: skip
        _store_half(
            right, target, c_row, height, stride, col + HALF, end, bias, step,
            ROWS, HALF, HAS_BIAS, BEGUN,
        )  # fmt: skip
        part = tl.load(place + _PART)
        word = tl.load(place + _WORD)
        following = places + tl.minimum(tile + programs, tiles) * _FIELDS
        stored += 1
        leaves = tl.load(following + _PART) != part
        told = tl.where(leaves & (word >= 0), stored, 0)
        count_tiles(counters + part, told, tl.load(place + _COUNT), signals + word, ON_GPU)
        stored = tl.where(leaves, 0, stored)
