"""The activation between two products of experts, times the gates of rows. Device code only."""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import EXPERTS_SWIGLU, EXPERTS_SWIGLU_GRADIENT


@triton.jit
def _halves_of(z, at, f, mask):
    """Return both halves of columns of rows of z in float32; at: elements of the first half."""
    first = tl.load(z + at, mask=mask, other=0).to(tl.float32)
    return first, tl.load(z + at + f, mask=mask, other=0).to(tl.float32)


@triton.jit(do_not_specialize=EXPERTS_SWIGLU.unknown)
def experts_swiglu(  # noqa: PLR0913 - a kernel's arguments are its interface
    z,
    gates,
    routing,
    h,
    list_at: tl.int32,
    capacity: tl.int32,
    f: tl.int32,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store silu of the first half of each row, times the second half and the gate of its slot.

    z: [capacity, 2 f]; h: [capacity, f]. Rows that no expert has are neither read nor stored.
    gates: float32, of the slots of all ranks.
    routing: int32; list_at: the place of the list in it.
    """
    across = tl.cdiv(f, BLOCK_N)
    row = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < tl.minimum(tl.load(routing), capacity)
    slot = tl.load(routing + list_at + row, mask=inside, other=0)
    gate = tl.load(gates + slot, mask=inside, other=0)
    mask = inside[:, None] & (col < f)[None, :]
    wide = row.to(tl.int64)[:, None] * f
    first, second = _halves_of(z, 2 * wide + col[None, :], f, mask)
    value = first * tl.sigmoid(first) * second * gate[:, None]
    tl.store(h + wide + col[None, :], value.to(h.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=EXPERTS_SWIGLU_GRADIENT.unknown)
def experts_swiglu_gradient(  # noqa: PLR0913
    z,
    gates,
    dh,
    routing,
    dz,
    dgates,
    list_at: tl.int32,
    capacity: tl.int32,
    f: tl.int32,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store the gradients of z and of the gates of rows, from that of h.

    dz: [capacity, 2 f]. dgates: float32, of the slots of all ranks; those of other rows stay.
    A program has whole rows, so sums of columns have one order.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < tl.minimum(tl.load(routing), capacity)
    slot = tl.load(routing + list_at + row, mask=inside, other=0)
    gate = tl.load(gates + slot, mask=inside, other=0)[:, None]
    wide = row.to(tl.int64)[:, None] * f
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in tl.range(0, f, BLOCK_N):
        col = begin + tl.arange(0, BLOCK_N)
        mask = inside[:, None] & (col < f)[None, :]
        at = 2 * wide + col[None, :]
        first, second = _halves_of(z, at, f, mask)
        change = tl.load(dh + wide + col[None, :], mask=mask, other=0).to(tl.float32)
        sigmoid = tl.sigmoid(first)
        silu = first * sigmoid
        total += change * silu * second
        change *= gate
        of_first = change * second * (sigmoid + silu * (1 - sigmoid))
        tl.store(dz + at, of_first.to(dz.dtype.element_ty), mask=mask)
        tl.store(dz + at + f, (change * silu).to(dz.dtype.element_ty), mask=mask)
    tl.store(dgates + slot, tl.sum(total, 1), mask=inside)
