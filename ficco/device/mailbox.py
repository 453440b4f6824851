"""Triton functions for mailboxes: memory in which an element shows whether it has arrived.

An element of a mailbox that has not arrived holds a vacant value, which `put` never sends. A reader
needs no signal, so the data arrive one latency earlier. `take` makes its elements vacant again.

    call = begin_call(window)
    box = box + (call & 1) * elements_of_a_copy
    put(...) at every peer; end_call(call, window); take(...) from every peer

A rank may write to a peer's mailbox only when the peer has taken the earlier data. With two copies,
which calls use in turn, this holds if every program of a call takes data from every peer: the peer
is then in this call, so its previous call has ended, and with it all reads of the other copy.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.device.bounds import checked
from ficco.device.memory import remote_ptr
from ficco.device.state import fail, now_ns, on_gpu, status_of, timeout_of
from ficco.kernels.mailbox import sendable
from ficco.kernels.mailbox import take as take_blocks
from ficco.plan.tables import VACANT

_VACANT_16 = tl.constexpr((VACANT & 0xFFFF) - (1 << 16))
_VACANT_32 = tl.constexpr(VACANT - (1 << 32))


@checked(data="pointer")
@triton.jit
def put(pointer, value, pe, call, window, mask=None):
    """Store values in rank `pe`'s mailbox.

    Order: none. Stores of elements are atomic and become visible in any order. The reader sees an
    element by `take`. Other memory is not ordered.

    Args:
        pointer: symmetric pointers to elements of a mailbox: float32, float16 or bfloat16.
        value: the values, rounded to that dtype. -0.0 is sent as 0.0; the float32 value -4.59e-41,
            whose bits mark a vacant element, too.
        pe: int32, the rank.
        call: the result of `begin_call`; if it is negative, nothing is stored.
        window: the table.
        mask: which elements to store.

    Example:
        ``fd.mailbox.put(box + rank * count + at, values, peer, call, window, at < count)``
    """
    bits = sendable(value.to(pointer.dtype.scalar.element_ty))
    target = remote_ptr(pointer, pe, window).to(tl.pointer_type(bits.dtype.scalar))
    wanted = call >= 0
    if mask is not None:
        wanted = mask & wanted
    tl.store(target, bits, mask=wanted)


@triton.jit
def _misses(boxes, distance, vacant, mask, COUNT: tl.constexpr):
    """Return the number of a block that has not arrived, or -1."""
    late = tl.full((), -1, tl.int32)
    for block in tl.static_range(COUNT):
        bits = tl.load(boxes + block * distance, mask=mask, other=0, volatile=True)
        empty = tl.max(tl.max((bits == vacant).to(tl.int32), 1), 0)
        late = tl.where((empty != 0) & (late < 0), block, late)
    return late


@triton.jit
def _await(pointer, distance, mask, window, COUNT: tl.constexpr):
    """In the interpreter, wait until all blocks have arrived or the wait gives up."""
    if pointer.dtype.scalar.element_ty.primitive_bitwidth == 32:
        boxes, vacant = pointer.to(tl.pointer_type(tl.int32)), _VACANT_32
    else:
        boxes, vacant = pointer.to(tl.pointer_type(tl.int16)), _VACANT_16
    status, limit_ns = status_of(window), timeout_of(window)
    begin = now_ns()
    late = _misses(boxes, distance, vacant, mask, COUNT)
    while (late >= 0) & (tl.load(status, volatile=True) == 0) & (now_ns() - begin < limit_ns):
        late = _misses(boxes, distance, vacant, mask, COUNT)
    if late >= 0:
        fail(-1 - late, window)


@checked(data="pointer")
@triton.jit
def take_sum(
    pointer,
    distance,
    call,
    window,
    mask,
    COUNT: tl.constexpr,
):
    """Wait for COUNT blocks of this rank's mailbox, make them vacant, and return their sum.

    It waits for all blocks at the same time. Order: none. A peer may `put` to the same elements
    again only after this program has signaled it, for example by its own `put` in the next call.

    Args:
        pointer: pointers to the elements of the first block, [rows, cols]; at least one element
            per thread of the program.
        distance: elements from one block to the next, int32 or int64.
        call: the result of `begin_call`.
        window: the table.
        mask: which elements to take, [rows, cols].
        COUNT: number of blocks, which are added in order.

    Returns:
        The float32 sum, [rows, cols], and 1. If the wait gives up, as `wait` does, NaN and 0; the
        status becomes -1 - the number of a missing block.

    Example:
        ``total, came = fd.mailbox.take_sum(box + at, count, call, window, at < count, WORLD)``
    """
    status, limit_ns = status_of(window), timeout_of(window)
    if not on_gpu:
        _await(pointer, distance, mask, window, COUNT)
    total, late = take_blocks(
        pointer, distance, mask, status, limit_ns, 0, 0.0, COUNT, False, on_gpu
    )
    came = (late < 0) & (call >= 0)
    if late >= 0:
        fail(-1 - late, window)
    return tl.where(came, total, float("nan")), came.to(tl.int32)


@checked(data="pointer")
@triton.jit
def take(pointer, call, window, mask):
    """Wait for a block of this rank's mailbox, make it vacant, and return it.

    Args:
        pointer: pointers to the elements, [rows, cols]; at least one element per thread.
        call: the result of `begin_call`.
        window: the table.
        mask: which elements to take, [rows, cols].

    Returns:
        The values in float32, [rows, cols], and 1; or NaN and 0, as `take_sum`.

    Example:
        ``values, came = fd.mailbox.take(box + at, call, window, at < count)``
    """
    return take_sum(pointer, 0, call, window, mask, 1)
