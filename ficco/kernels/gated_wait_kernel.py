"""The gated GEMM's device code: persistent programs over the tiles of parts, in order.

A tile belongs to one part; tiles of own parts come first. Programs of a launch of P:

    program p   own tiles p, p+P, ... | part 0's word, its tiles | part 1's word, its tiles | ...

A loop for each source, so that the loop over k knows it when it is compiled. Each is merged with
its loop over k: what the next tile reads is on its way while this one is multiplied and stored. So
a tile's word is awaited before the last steps of the tile before it, in front of its first loads.
The last tiles may be shared; see `sharing`. The program that ends last may give the window back;
see `release`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import GATED
from ficco.kernels.signal_wait import await_if
from ficco.kernels.split_k import share_tiles
from ficco.kernels.tile_product import AWAITED, PART, PLACE_FIELDS, multiplied, store_tile
from ficco.kernels.window_release_kernel import give_window_back

__all__ = ["gated_gemm"]


@triton.jit(do_not_specialize=GATED.unknown)
def gated_gemm(  # noqa: PLR0913
    own,
    window,
    b,
    bias,
    c,
    places,
    scratch,
    shares,
    words,
    stop,
    status,
    value: tl.int32,
    own_tiles: tl.int32,
    whole: tl.int32,
    shared: tl.int32,
    among: tl.int32,
    k: tl.int32,
    own_stride: tl.int64,
    window_stride: tl.int64,
    b_deep_stride: tl.int64,
    b_col_stride: tl.int64,
    has_bias: tl.int32,
    c_stride: tl.int64,
    timeout_ns: tl.int64,
    cleared,
    homes,
    ended,
    clear_count: tl.int32,
    copy: tl.int32,
    raised: tl.int32,
    peers: tl.int64,
    ROWS: tl.constexpr,  # noqa: N803 - Triton's way to mark constants
    COLS: tl.constexpr,  # noqa: N803
    DEEP: tl.constexpr,  # noqa: N803
    OWN_BULK: tl.constexpr,  # noqa: N803
    WINDOW_BULK: tl.constexpr,  # noqa: N803
    B_BULK: tl.constexpr,  # noqa: N803
    B_TURNED: tl.constexpr,  # noqa: N803
    COL_STEP: tl.constexpr,  # noqa: N803
    WORLD: tl.constexpr,  # noqa: N803
    ON_GPU: tl.constexpr,  # noqa: N803
):
    """Store every part's rows of a.b (+ bias) in c.

    own, window, b: descriptors, if their _BULK is set, of blocks of ROWS x DEEP, and DEEP x COLS
    (COLS x DEEP if B_TURNED is 1); else pointers, with their strides in elements. A stride that
    B_TURNED says is 1 is not read; see `tile_product.multiplied`.
    bias: one row of adjacent elements; has_bias: 0 if there is none, and it is not read.
    places: of tiles, see `tile_product`.
    words, stop, status: pointers to int32; value: what words are awaited to be; timeout_ns: how
    long a program waits before it gives up.
    own_tiles, whole: tiles of own parts, and of all, that no programs share; k: depth.
    scratch, shares, shared, among: of shared tiles, which are of the window, see `sharing`; where
    there is none the window is own.
    COL_STEP: what divides where columns of tiles begin and of parts end.
    cleared, clear_count, homes, copy, ended, raised, peers: of giving the window back, see
    `release`; without peers it is not given back, and none of the others is read. WORLD: likewise,
    and only the interpreter looks at it.
    ON_GPU: False in Triton's interpreter.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    steps = tl.cdiv(k, DEEP)
    for tile in tl.range(program, own_tiles, programs, flatten=True):
        place = places + tile * PLACE_FIELDS
        total = multiplied(
            own, place, own_stride, b, b_deep_stride, b_col_stride, 0, steps, k,
            ROWS, COLS, DEEP, OWN_BULK, B_BULK, B_TURNED, ON_GPU,
        )  # fmt: skip
        store_tile(total, c, place, c_stride, bias, has_bias, ROWS, COLS, COL_STEP, False)

    # The same over the window. A program awaits a part's word once, before its first tile of it,
    # and once one was given up only looks at others. What it cannot know it multiplies all
    # the same, and stores NaN: a k loop that may not run is compiled to worse code.
    begin = program + tl.cdiv(tl.maximum(own_tiles - program, 0), programs) * programs
    acquired = -1
    came = 1
    for tile in tl.range(begin, whole, programs, flatten=True):
        place = places + tile * PLACE_FIELDS
        part = tl.load(place + PART)
        word = tl.load(place + AWAITED)
        asked = (part != acquired) & (word >= 0)
        came = tl.where(part != acquired, 1, came)
        acquired = part
        here = await_if(
            asked, words + word, value, stop, timeout_ns, status, part + 1, WINDOW_BULK, ON_GPU
        )
        came = tl.where(asked, here, came)
        total = multiplied(
            window, place, window_stride, b, b_deep_stride, b_col_stride, 0, steps, k,
            ROWS, COLS, DEEP, WINDOW_BULK, B_BULK, B_TURNED, ON_GPU,
        )  # fmt: skip
        store_tile(
            tl.where(came != 0, total, float("nan")), c, place, c_stride, bias, has_bias,
            ROWS, COLS, COL_STEP, False,
        )  # fmt: skip
    share_tiles(
        window, b, bias, c, c, places, scratch, shares, words, words, words, stop, status, value,
        shared, among, whole, k, window_stride, b_deep_stride, b_col_stride, has_bias, c_stride,
        c_stride, timeout_ns,
        ROWS, COLS, DEEP, WINDOW_BULK, B_BULK, B_TURNED, False, COL_STEP, True, ON_GPU,
    )  # fmt: skip
    give_window_back(words, cleared, clear_count, homes, copy, ended, raised, peers, WORLD, ON_GPU)
