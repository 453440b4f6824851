"""Sums or means of table rows, bag by bag, in float32. Device code only."""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import POOL

__all__ = ["pool_rows"]


@triton.jit(do_not_specialize=POOL.unknown)
def pool_rows(  # noqa: PLR0913 - a kernel's arguments are its interface
    target,
    table,
    indices,
    offsets,
    weights,
    first: tl.int32,
    batch: tl.int32,
    lookups: tl.int64,
    mean: tl.int32,
    dim: tl.int32,
    table_stride: tl.int64,
    target_stride: tl.int64,
    LOOKUPS: tl.constexpr,  # noqa: N803 - Triton's way to mark constants
    COLS: tl.constexpr,  # noqa: N803
    WEIGHTED: tl.constexpr,  # noqa: N803
):
    """Store in row i of target the sum, or the mean, of the table's rows of bag first + i.

    weights: a factor per lookup, read if WEIGHTED. mean: 1 for means, 0 for sums.
    """
    place = tl.program_id(0)
    bag = first + place
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    begin = tl.load(offsets + bag).to(tl.int64)
    end = tl.load(offsets + bag + 1, mask=bag + 1 < batch, other=lookups).to(tl.int64)
    total = tl.zeros((COLS,), tl.float32)
    at = begin
    while at < end:
        each = at + tl.arange(0, LOOKUPS)
        row = tl.load(indices + each, mask=each < end, other=0)
        inside = (each < end)[:, None] & (col < dim)[None, :]
        rows = tl.load(table + row[:, None] * table_stride + col[None, :], mask=inside, other=0)
        rows = rows.to(tl.float32)
        if WEIGHTED:
            rows = rows * tl.load(weights + each, mask=each < end, other=0)[:, None]
        total += tl.sum(rows, axis=0)
        at += LOOKUPS
    if mean != 0:
        total = total / tl.maximum(end - begin, 1).to(tl.float32)
    tl.store(
        target + place.to(tl.int64) * target_stride + col,
        total.to(target.dtype.element_ty),
        mask=col < dim,
    )
