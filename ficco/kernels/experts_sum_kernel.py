"""Sums of the slots of each token. Device code only."""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import EXPERTS_SUM


@triton.jit(do_not_specialize=EXPERTS_SUM.unknown)
def experts_sum(  # noqa: PLR0913 - a kernel's arguments are its interface
    rows,
    routing,
    y,
    ids_at: tl.int32,
    tokens: tl.int32,
    topk: tl.int32,
    all_experts: tl.int32,
    d: tl.int32,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store the sum of each token's rows, in the order of its slots, as `ficco.kernels.experts`.

    rows: [tokens, topk, d]; y: [tokens, d].
    routing: int32; ids_at: the place in it of the experts of the slots, [tokens, topk].
    """
    across = tl.cdiv(d, BLOCK_N)
    token = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token, is_col = token < tokens, col < d
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for j in tl.range(0, topk):
        slot = token * topk + j
        id = tl.load(routing + ids_at + slot, mask=is_token, other=-1)
        valid = (id >= 0) & (id < all_experts)
        at = rows + slot.to(tl.int64)[:, None] * d + col[None, :]
        row = tl.load(at, mask=valid[:, None] & is_col[None, :], other=0).to(tl.float32)
        total += tl.where((id >= all_experts)[:, None], float("nan"), row)
    at = y + token.to(tl.int64)[:, None] * d + col[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=is_token[:, None] & is_col[None, :])
