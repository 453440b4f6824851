"""The summing GEMM's device code: own parts are added to the terms that peers have pushed.

    own parts, one per chunk: product | wait for all its words | add terms and bias, round, store

Earlier launches have computed everything that a peer's launch waits for. But a part may raise a
word when it is stored, as in `gated_push_kernel`, for a stream that sends it on. Loops over tiles
are merged with those over k, as in `gated_wait_kernel`. A program waits for a part's words after
the first product of the part, which gives peers that time, while the next tile is in flight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import SUMMING
from ficco.kernels.signals import await_if
from ficco.kernels.sum_epilogue import TERM_FIELDS, TERM_WORD
from ficco.kernels.tile_product import (
    PART,
    PLACE_FIELDS,
    count_stored,
    multiplied,
    store_summed,
)

__all__ = ["summing_gemm"]


@triton.jit(do_not_specialize=SUMMING.unknown)
def summing_gemm(  # noqa: PLR0913 - a kernel's arguments are its interface
    own,
    b,
    bias,
    c,
    recv,
    places,
    terms,
    counters,
    words,
    signals,
    stop,
    status,
    value: tl.int32,
    whole: tl.int32,
    k: tl.int32,
    own_stride: tl.int64,
    b_deep_stride: tl.int64,
    b_col_stride: tl.int64,
    has_bias: tl.int32,
    c_stride: tl.int64,
    recv_stride: tl.int64,
    timeout_ns: tl.int64,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEEP: tl.constexpr,
    OWN_BULK: tl.constexpr,
    B_BULK: tl.constexpr,
    B_TURNED: tl.constexpr,
    TERMS: tl.constexpr,
    OWN_AT: tl.constexpr,
    BEGUN: tl.constexpr,
    COL_STEP: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Store every part's rows and columns of own.b (+ bias), summed with its terms, in c.

    The arguments of `pushing_gemm` and `gated_gemm`, and:

    recv: pointer to the receive buffer of peers' rows, with its stride in elements.
    terms: int32 [parts, TERMS, 2]: a term's first row in recv, and its word or -1.
    TERMS, OWN_AT: number of terms of a part, and number of terms before the own product.
    """
    steps = tl.cdiv(k, DEEP)
    programs = tl.num_programs(0)
    acquired = -1
    came = 1
    stored = 0
    for tile in tl.range(tl.program_id(0), whole, programs, flatten=True):
        place = places + tile * PLACE_FIELDS
        total = multiplied(
            own, place, own_stride, b, b_deep_stride, b_col_stride, 0, steps, k,
            ROWS, COLS, DEEP, OWN_BULK, B_BULK, B_TURNED, ON_GPU,
        )  # fmt: skip
        part = tl.load(place + PART)
        at_terms = terms + part * (TERMS * TERM_FIELDS)
        asked = part != acquired
        came = tl.where(asked, 1, came)
        acquired = part
        for i in tl.static_range(TERMS):
            word = tl.load(at_terms + i * TERM_FIELDS + TERM_WORD)
            here = await_if(
                asked & (word >= 0), words + word, value, stop, timeout_ns, status, part + 1,
                False, ON_GPU,
            )  # fmt: skip
            came = came & here
        store_summed(
            tl.where(came != 0, total, float("nan")), recv, at_terms, recv_stride, c, place,
            c_stride, bias, has_bias, ROWS, COLS, TERMS, OWN_AT, BEGUN, COL_STEP,
        )  # fmt: skip
        stored = count_stored(places, tile, whole, stored, counters, signals, ON_GPU)
