"""The pushing GEMM's device code: it waits for nothing, and tells as soon as a part is stored.

    parts for peers, in the order in which they are pushed | own parts, which no peer waits for

Tiles are numbered through all parts; a table says of each where it lies, so that nothing has to be
looked for, and the loop over tiles is merged with the one over k: what the next tile reads is on
its way while this one is stored.

A program counts the tiles that it has stored of a part when its next one is of another part: each
count has to wait until all stores before it are done. The last tiles may be shared; see `sharing`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import PUSHING
from ficco.kernels.split_k import share_tiles
from ficco.kernels.tile_product import (
    PLACE_FIELDS,
    count_stored,
    multiplied,
    store_tile,
    target_of,
)

__all__ = ["pushing_gemm"]


@triton.jit(do_not_specialize=PUSHING.unknown)
def pushing_gemm(  # noqa: PLR0913
    own,
    b,
    bias,
    c,
    partial,
    places,
    scratch,
    shares,
    counters,
    signals,
    stop,
    status,
    whole: tl.int32,
    shared: tl.int32,
    among: tl.int32,
    k: tl.int32,
    own_stride: tl.int64,
    b_deep_stride: tl.int64,
    b_col_stride: tl.int64,
    has_bias: tl.int32,
    c_stride: tl.int64,
    partial_stride: tl.int64,
    timeout_ns: tl.int64,
    ROWS: tl.constexpr,  # noqa: N803
    COLS: tl.constexpr,  # noqa: N803
    DEEP: tl.constexpr,  # noqa: N803
    OWN_BULK: tl.constexpr,  # noqa: N803
    B_BULK: tl.constexpr,  # noqa: N803
    B_TURNED: tl.constexpr,  # noqa: N803
    BEGUN: tl.constexpr,  # noqa: N803
    COL_STEP: tl.constexpr,  # noqa: N803
    ON_GPU: tl.constexpr,  # noqa: N803
):
    """Store every part's rows and columns of own.b in its target, and raise the part's word.

    own, b: descriptors or pointers, as those of `gated_gemm`; c, partial: pointers to one
    dtype, with their strides in elements; `partial` gets no bias. They are equal where no tile goes
    there. places: of tiles, see `tile_product`.
    counters: int32, one a part, all 0; they are 0 again when the launch ends.
    signals: pointer to int32.
    whole: how many tiles no programs share; k: depth.
    scratch, shares, shared, among: of shared tiles, see `sharing`, and for them:
    stop, status, timeout_ns: as those of `gated_gemm`.
    COL_STEP: what divides where columns of tiles begin and of parts end.
    BEGUN: whether parts are added to what their targets hold.
    """
    programs = tl.num_programs(0)
    steps = tl.cdiv(k, DEEP)
    stored = 0
    for tile in tl.range(tl.program_id(0), whole, programs, flatten=True):
        place = places + tile * PLACE_FIELDS
        total = multiplied(
            own, place, own_stride, b, b_deep_stride, b_col_stride, 0, steps, k,
            ROWS, COLS, DEEP, OWN_BULK, B_BULK, B_TURNED, ON_GPU,
        )  # fmt: skip
        target, stride, biased = target_of(place, c, c_stride, partial, partial_stride, has_bias)
        store_tile(total, target, place, stride, bias, biased, ROWS, COLS, COL_STEP, BEGUN)
        stored = count_stored(places, tile, whole, stored, counters, signals, ON_GPU)
    share_tiles(
        own, b, bias, c, partial, places, scratch, shares, signals, counters, signals, stop, status,
        0, shared, among, whole, k, own_stride, b_deep_stride, b_col_stride, has_bias, c_stride,
        partial_stride, timeout_ns,
        ROWS, COLS, DEEP, OWN_BULK, B_BULK, B_TURNED, BEGUN, COL_STEP, False, ON_GPU,
    )  # fmt: skip
