"""The pushing GEMM's device code: it does not wait, and signals as soon as a part is stored.

    parts for peers, in the order of their pushes | own parts, which no peer waits for

Tiles are numbered across all parts, and a table holds the place of each tile, so no search is
needed. The loop over tiles is merged with the loop over k: the loads of the next tile are in flight
while this tile is stored.

A program counts its stored tiles of a part when its next tile is of another part, because each
count must wait for all earlier stores. The last tiles may be split; see `split_k`.
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
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEEP: tl.constexpr,
    OWN_BULK: tl.constexpr,
    B_BULK: tl.constexpr,
    B_TURNED: tl.constexpr,
    BEGUN: tl.constexpr,
    COL_STEP: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Store every part's rows and columns of own.b in its target, and raise the part's word.

    own, b: descriptors or pointers, as in `gated_gemm`; c, partial: pointers to one dtype, with
    strides in elements; `partial` gets no bias, and equals c if it is no tile's target.
    places: of tiles, see `tile_product`.
    counters: int32, one per part, all 0; they are 0 again when the launch ends.
    signals: pointer to int32.
    whole: number of tiles that are not split; k: depth.
    scratch, shares, shared, among: for split tiles, see `split_k`; only they use
    stop, status, timeout_ns: as in `gated_gemm`.
    COL_STEP: divisor of the first columns of tiles and of the end columns of parts.
    BEGUN: whether parts accumulate into their targets.
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
        0, shared, 0, among, whole, k, own_stride, b_deep_stride, b_col_stride, has_bias, c_stride,
        partial_stride, timeout_ns,
        ROWS, COLS, DEEP, OWN_BULK, B_BULK, B_TURNED, BEGUN, COL_STEP, False, ON_GPU,
    )  # fmt: skip
