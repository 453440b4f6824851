"""The gated GEMM's device code: persistent programs over the tiles of parts, in order.

A tile belongs to one part; tiles of own parts come first. Programs of a launch of P:

    program p   own tiles p, p+P, ... | part 0's word, its tiles | part 1's word, its tiles | ...

There is one loop per source, so that the source is a compile-time constant of the loop over k. Each
loop is merged with its loop over k: the loads of the next tile are in flight while this tile is
multiplied and stored. So the wait for a tile's word comes before its first loads, which is before
the last steps of the previous tile. The last tiles may be split; see `split_k`. In a launch of few
tiles these are all tiles, also those of own parts. The last program to end may release the window;
see `window_release_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import GATED
from ficco.kernels.signals import await_if
from ficco.kernels.split_k import share_tiles
from ficco.kernels.tile_product import AWAITED, PART, PLACE_FIELDS, multiplied, store_tile
from ficco.kernels.tuple_arguments import unpacked
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
    bounds,
    k: tl.int32,
    own_stride: tl.int64,
    window_stride: tl.int64,
    b_deep_stride: tl.int64,
    b_col_stride: tl.int64,
    has_bias: tl.int32,
    c_stride: tl.int64,
    timeout_ns: tl.int64,
    release_words,
    homes,
    release,
    copy: tl.int32,
    peers: tl.int64,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEEP: tl.constexpr,
    OWN_BULK: tl.constexpr,
    WINDOW_BULK: tl.constexpr,
    B_BULK: tl.constexpr,
    B_TURNED: tl.constexpr,
    COL_STEP: tl.constexpr,
    WORLD: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Store every part's rows of a.b (+ bias) in c.

    own, window, b: descriptors, if their _BULK is set, of blocks of ROWS x DEEP, and DEEP x COLS
    (COLS x DEEP if B_TURNED is 1); else pointers, with their strides in elements. A stride that is
    1 by B_TURNED is not read; see `tile_product.multiplied`.
    bias: one row of adjacent elements; it is not read if has_bias is 0.
    places: of tiles, see `tile_product`.
    words, stop, status: pointers to int32; value: the value that words are waited for to have;
    timeout_ns: time limit of a program's wait.
    bounds: own_tiles, whole: number of tiles that are not split, of own parts and of all; shared,
    among, like scratch and shares: for split tiles, see `split_k`. The first `own_shared` of them
    are tiles of own parts, the others of the window (which is own if there are no window tiles).
    k: depth.
    COL_STEP: divisor of the first columns of tiles and of the end columns of parts.
    release_words (cleared, ended), homes, release (number of words to clear, word to raise), copy,
    peers: for the release of the window, see `window_release_kernel`; without peers there is no
    release, and the others are not read. WORLD: likewise, and only the interpreter reads it.
    ON_GPU: False in Triton's interpreter.
    """
    own_tiles, whole, own_shared, shared, among = unpacked(bounds, tl.int32)
    cleared, ended = release_words
    clear_count, raised = unpacked(release, tl.int32)
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

    # The same for the window. A program waits for a part's word once, before its first tile of the
    # part. After a timeout it reads other words once. A tile without its rows is multiplied anyway
    # and stored as NaN: a k loop that may not run compiles to worse code.
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
        own, b, bias, c, c, places, scratch, shares, words, words, words, stop, status, value,
        own_shared, 0, among, whole, k, own_stride, b_deep_stride, b_col_stride, has_bias, c_stride,
        c_stride, timeout_ns,
        ROWS, COLS, DEEP, OWN_BULK, B_BULK, B_TURNED, False, COL_STEP, True, ON_GPU,
    )  # fmt: skip
    share_tiles(
        window, b, bias, c, c, places, scratch, shares, words, words, words, stop, status, value,
        shared, own_shared, among, whole, k, window_stride, b_deep_stride, b_col_stride, has_bias,
        c_stride, c_stride, timeout_ns,
        ROWS, COLS, DEEP, WINDOW_BULK, B_BULK, B_TURNED, False, COL_STEP, True, ON_GPU,
    )  # fmt: skip
    give_window_back(words, cleared, clear_count, homes, copy, ended, raised, peers, WORLD, ON_GPU)
