"""The gated GEMM's device code for AMD's devices: persistent programs over tiles of parts.

Programs of a launch of P, as in `gated_wait_kernel`:

    program p   own tiles p, p+P, ... | part 0's word, its tiles | part 1's word, its tiles | ...

Matrices are read by pointers, no tile is split, and the launch does not release the window.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.amd_clock import ticks
from ficco.kernels.amd_declarations import GATED
from ficco.kernels.tile_product import AWAITED, PART, PLACE_FIELDS, multiplied, store_tile

_STOP_EVERY = tl.constexpr(32)  # polls


@triton.jit
def _now(
    ON_GPU: tl.constexpr,
):
    """Return the clock's time, or 0 in the interpreter, which has no clock."""
    return ticks() if ON_GPU else tl.full((), 0, tl.int64)


@triton.jit
def _await(  # noqa: PLR0913 - a wait has as many facts
    word,
    value,
    stop,
    limit,
    status,
    part,
    missed,
    number,
    ON_GPU: tl.constexpr,
):
    """Return 1 once the word has the value, and 0 if the wait gives up.

    It gives up when the word `stop` is not 0, when another wait has given up, or after `limit`
    ticks, but it reads the word at least once. Then the word `status` becomes the maximum of itself
    and `part`, and the word `missed` that of itself and `number`. One thread executes the atomic
    operations, and all get its results.
    """
    begin = _now(ON_GPU)
    came = tl.full((), 0, tl.int32)
    stopped = tl.full((), 0, tl.int32)
    polls = tl.full((), 0, tl.int32)
    while (came == 0) & (stopped == 0):
        if polls % _STOP_EVERY == 0:  # it may be in host memory, and all programs read it
            stopped = tl.atomic_or(stop, 0, sem="relaxed", scope="sys")
        polls += 1
        came = (tl.atomic_or(word, 0, sem="relaxed", scope="sys") == value).to(tl.int32)
        # Threads read different times. The one that executes this decides, and all see the status.
        late = (came == 0) & (_now(ON_GPU) - begin > limit)
        tl.atomic_max(status, part, mask=late, sem="relaxed", scope="sys")
        stopped |= tl.atomic_or(status, 0, sem="relaxed", scope="sys")
    # It acquires only now, since that empties caches that other programs use. The result is used:
    # otherwise the other threads would not wait for the one that acquires.
    if came != 0:
        came = (tl.atomic_or(word, 0, sem="acquire", scope="sys") == value).to(tl.int32)
    if came == 0:
        tl.atomic_max(status, part, sem="relaxed", scope="sys")
        tl.atomic_max(missed, number, sem="relaxed", scope="sys")
    return came


@triton.jit(do_not_specialize=GATED.unknown)
def ficco_gated_gemm(  # noqa: PLR0913
    own,
    window,
    b,
    bias,
    c,
    places,
    words,
    stop,
    status,
    missed,
    value: tl.int32,
    own_tiles: tl.int32,
    tiles: tl.int32,
    k: tl.int32,
    own_stride: tl.int64,
    window_stride: tl.int64,
    b_deep_stride: tl.int64,
    b_col_stride: tl.int64,
    has_bias: tl.int32,
    c_stride: tl.int64,
    limit: tl.int64,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEEP: tl.constexpr,
    B_TURNED: tl.constexpr,
    COL_STEP: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Store every part's rows of a.b (+ bias) in c. Arguments that are not here: see `gated_gemm`.

    missed: pointer to int32; the word becomes 1 + the largest index of a word that did not come.
    tiles: number of tiles; limit: of a program's wait, in ticks of the constant clock.
    """
    steps = tl.cdiv(k, DEEP)
    acquired = -1
    came = tl.full((), 1, tl.int32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        place = places + tile * PLACE_FIELDS
        part = tl.load(place + PART)
        if part != acquired:
            acquired = part
            came = tl.full((), 1, tl.int32)
            word = tl.load(place + AWAITED)
            if word >= 0:
                came = _await(
                    words + word, value, stop, limit, status, part + 1, missed, word + 1, ON_GPU
                )
        a = tl.where(tile < own_tiles, own, window)
        a_stride = tl.where(tile < own_tiles, own_stride, window_stride)
        total = multiplied(
            a, place, a_stride, b, b_deep_stride, b_col_stride, 0, steps, k,
            ROWS, COLS, DEEP, False, False, B_TURNED, ON_GPU,
        )  # fmt: skip
        total = tl.where(came != 0, total, float("nan"))
        store_tile(total, c, place, c_stride, bias, has_bias, ROWS, COLS, COL_STEP, False)
