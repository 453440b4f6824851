"""Triton functions that read and write other ranks' data: ordinary loads and stores, without order.

A symmetric pointer is a pointer into this rank's data; the same offset is valid at every rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.device import layout
from ficco.device.bounds import checked

_DATA = tl.constexpr(layout.DATA)
_OWN_DATA = tl.constexpr(layout.OWN_DATA)
_ALIGN = tl.constexpr(layout.ALIGN)


@checked()
@triton.jit
def remote_ptr(pointer, pe, window):
    """Return the pointer to the same element of rank `pe`'s data.

    It reads two entries of the table, and orders nothing. Translate a scalar pointer once, and then
    add offsets.

    Args:
        pointer: symmetric pointer into the data, a scalar or a block.
        pe: int32, the rank.
        window: the table.

    Example:
        ``tl.store(fd.remote_ptr(data, peer, window) + at, values)``
    """
    return moved(pointer, tl.load(window + _DATA + pe) - tl.load(window + _OWN_DATA))


@triton.jit
def moved(pointer, distance):
    """Return a pointer moved by a number of bytes, which `_ALIGN` divides."""
    size: tl.constexpr = pointer.dtype.scalar.element_ty.primitive_bitwidth // 8
    return pointer + tl.multiple_of(distance // size, _ALIGN // size)


@checked(data="pointer")
@triton.jit
def load(pointer, pe, window, mask=None, other=None):
    """Return elements of rank `pe`'s data. Order: as an ordinary load.

    Args:
        pointer: symmetric pointer or pointers.
        pe: int32, the rank.
        window: the table.
        mask: which elements to load.
        other: the value of the other elements.

    Example:
        ``values = fd.load(data + at, peer, window, at < count)``
    """
    return tl.load(remote_ptr(pointer, pe, window), mask=mask, other=other)


@checked(data="pointer")
@triton.jit
def store(pointer, value, pe, window, mask=None):
    """Store values in rank `pe`'s data. Order: as an ordinary store.

    The stores become visible to rank `pe` in any order. `signal` or `fence` orders them.

    Args:
        pointer: symmetric pointer or pointers.
        value: the values.
        pe: int32, the rank.
        window: the table.
        mask: as in `tl.store`.

    Example:
        ``fd.store(data + at, values, peer, window, at < count)``
    """
    tl.store(remote_ptr(pointer, pe, window), value, mask=mask)


@checked(data="dest", count="nelems")
@triton.jit
def put(
    dest,
    source,
    nelems,
    pe,
    window,
    BLOCK: tl.constexpr = 1024,
):
    """Copy contiguous elements from this rank's memory to rank `pe`'s data.

    Order: as ordinary loads and stores. When it returns, the elements may not have arrived, and
    other threads of the program may still read `source`.

    Args:
        dest: symmetric pointer to the first element.
        source: pointer to the first element, in any memory of this rank.
        nelems: int32 or int64, number of elements.
        pe: int32, the rank.
        window: the table.
        BLOCK: elements that the program copies in a step, a power of two.

    Example:
        ``fd.put(data, source, count, peer, window)``
    """
    tl.static_assert(dest.dtype == source.dtype, "dest and source need one dtype")
    remote = remote_ptr(dest, pe, window)
    for begin in tl.range(0, nelems, BLOCK, num_stages=1):
        at = begin + tl.arange(0, BLOCK)
        tl.store(remote + at, tl.load(source + at, mask=at < nelems), mask=at < nelems)


@checked(data="source", count="nelems")
@triton.jit
def get(
    dest,
    source,
    nelems,
    pe,
    window,
    BLOCK: tl.constexpr = 1024,
):
    """Copy contiguous elements from rank `pe`'s data to this rank's memory.

    Order: as ordinary loads and stores. Other threads of the program may read `dest` after
    `tl.debug_barrier()`.

    Args:
        dest: pointer to the first element, in any memory of this rank.
        source: symmetric pointer to the first element.
        nelems: int32 or int64, number of elements.
        pe: int32, the rank.
        window: the table.
        BLOCK: elements that the program copies in a step, a power of two.

    Example:
        ``fd.get(target, data, count, peer, window)``
    """
    tl.static_assert(dest.dtype == source.dtype, "dest and source need one dtype")
    remote = remote_ptr(source, pe, window)
    for begin in tl.range(0, nelems, BLOCK, num_stages=1):
        at = begin + tl.arange(0, BLOCK)
        tl.store(dest + at, tl.load(remote + at, mask=at < nelems), mask=at < nelems)
