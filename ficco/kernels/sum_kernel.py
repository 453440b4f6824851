"""The sum of partial results: peers' slots, the own part, and a bias. Device code only.

It is one pass: sums are float32, in the order of ranks, and rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import SUM

__all__ = ["sum_terms"]


@triton.jit(do_not_specialize=SUM.unknown)
def sum_terms(  # noqa: PLR0913 - a kernel's arguments are its interface
    target,
    slots,
    own,
    bias,
    rows: tl.int32,
    cols: tl.int32,
    target_stride: tl.int64,
    slots_stride: tl.int64,
    slot_rows: tl.int32,
    own_stride: tl.int64,
    own_at: tl.int32,
    has_bias: tl.int32,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Store in target the sum of COUNT slots, with own before slot own_at, and bias if has_bias."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    col = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    inside = (row < rows) & (col < cols)
    mine = tl.load(own + row * own_stride + col, mask=inside, other=0).to(tl.float32)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for i in tl.static_range(COUNT + 1):
        total += tl.where(own_at == i, mine, 0.0)
        if i < COUNT:
            part = slots + (i * slot_rows + row) * slots_stride + col
            total += tl.load(part, mask=inside, other=0).to(tl.float32)
    term = tl.load(bias + col, mask=(col < cols) & (has_bias != 0), other=0)
    total += term.to(tl.float32)
    tl.store(target + row * target_stride + col, total.to(target.dtype.element_ty), mask=inside)
