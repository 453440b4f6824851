"""Kernels of the tests of ficco.device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ficco import device as fd

__all__ = [
    "all_meet", "astray", "compare", "delayed_sum", "exchange", "pull_around", "push_around",
]  # fmt: skip


@triton.jit
def push_around(data, signals, source, out, window, count, call, WORLD: tl.constexpr):
    """Send `source` to the next rank, wait for the previous one's, and acknowledge that."""
    rank = fd.my_pe(window)
    after, before = (rank + 1) % WORLD, (rank + WORLD - 1) % WORLD
    free = fd.wait(signals, "eq", call, window)  # the next rank has read the last elements
    fd.put_signal(data, source, count, signals + 1, call + 1, "set", after, window, BLOCK=256)
    came = fd.wait(signals + 1, "ge", call + 1, window)
    for begin in tl.range(0, count, 256, num_stages=1):
        at = begin + tl.arange(0, 256)
        tl.store(out + at, tl.load(data + at, at < count), at < count)
    fd.signal(signals, 1, "add", before, window)
    tl.store(out + count, (free + came).to(tl.float32))


@triton.jit
def pull_around(data, source, out, window, count, WORLD: tl.constexpr):
    """Store `source` in the own data, and read the next rank's between two barriers."""
    rank = fd.my_pe(window)
    fd.put(data, source, count, rank, window, BLOCK=128)
    met = fd.barrier(8, window, WORLD)
    fd.get(out, data, count, (rank + 1) % WORLD, window, BLOCK=128)
    met += fd.barrier(8, window, WORLD)
    tl.store(out + count, met.to(tl.float32))


@triton.jit
def exchange(
    data, signals, source, out, window, rows, cols, WORLD: tl.constexpr, COLS: tl.constexpr
):
    """Store row r of `source` at rank r by blocks, and copy what came; one program per rank."""
    rank, peer = fd.my_pe(window), tl.program_id(0)
    for left in tl.range(0, cols, COLS):
        at = left + tl.arange(0, COLS)
        row = tl.load(source + peer * cols + at, at < cols)
        fd.store(data + rank * cols + at, row, peer, window, at < cols)
    fd.fence()
    fd.signal(signals + rank, 1, "add", peer, window)
    came = fd.wait(signals + peer, "eq", 1, window)
    for left in tl.range(0, cols, COLS):
        at = left + tl.arange(0, COLS)
        seen = fd.load(data + peer * cols + at, rank, window, at < cols)
        tl.store(out + peer * cols + at, seen, (at < cols) & (came != 0))
    tl.store(signals + peer, 0)


@triton.jit
def compare(signals, out, window):
    """Store what waits say of a signal that is 5, and has nobody to raise it."""
    tl.store(out + 0, fd.wait(signals, "eq", 5, window))
    tl.store(out + 1, fd.wait(signals, "ne", 4, window))
    tl.store(out + 2, fd.wait(signals, "gt", 4, window))
    tl.store(out + 3, fd.wait(signals, "ge", 5, window))
    tl.store(out + 4, fd.wait(signals, "lt", 6, window))
    tl.store(out + 5, fd.wait(signals, "le", 5, window))
    tl.store(out + 6, fd.wait(signals + 2, "ge", 6, window))  # the first that does not come
    tl.store(out + 7, fd.wait(signals, "ne", 5, window))
    tl.store(out + 8, fd.wait(signals, "gt", 5, window))
    tl.store(out + 9, fd.wait(signals, "lt", 5, window))
    tl.store(out + 10, fd.wait(signals, "le", 4, window))
    tl.store(out + 11, fd.wait(signals, "eq", 5, window))  # one that came is still seen


@triton.jit
def all_meet(out, window, WORLD: tl.constexpr):
    """Store whether a barrier was met."""
    tl.store(out, fd.barrier(0, window, WORLD))


@triton.jit
def astray(
    data, signals, box, own, out, window, mail, WHAT: tl.constexpr, PE: tl.constexpr,
    FIRST: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Call one function, with what may not exist."""
    at = FIRST + tl.arange(0, 8)
    near, tile = tl.arange(0, 8) < COUNT, at[None, :]
    if WHAT == "put":
        fd.put(data + FIRST, own, COUNT, PE, window)
    elif WHAT == "get":
        fd.get(own, data + FIRST, COUNT, PE, window)
    elif WHAT == "store":
        fd.store(data + at, tl.load(own + tl.arange(0, 8)), PE, window, near)
    elif WHAT == "load":
        tl.store(own + tl.arange(0, 8), fd.load(data + at, PE, window, near, 0.0))
    elif WHAT == "remote_ptr":
        tl.store(fd.remote_ptr(data, PE, window) + at, tl.load(own + tl.arange(0, 8)), near)
    elif WHAT == "signal":
        fd.signal(signals + FIRST, 1, "add", PE, window)
    elif WHAT == "put_signal":
        fd.put_signal(data, own, COUNT, signals + FIRST, 1, "set", PE, window)
    elif WHAT == "wait":
        tl.store(out, fd.wait(signals + FIRST, "eq", 0, window))
    elif WHAT == "barrier":
        tl.store(out, fd.barrier(FIRST, window, COUNT))
    elif WHAT == "mailbox.put":
        fd.mailbox.put(box + at, tl.load(own + tl.arange(0, 8)), PE, 0, mail, near)
    else:
        _, came = fd.mailbox.take_sum(box + tile, 4, 0, mail, near[None, :], COUNT)
        tl.store(out, came)


@triton.jit
def delayed_sum(x, y, box, window, rows, cols, WORLD: tl.constexpr, ROWS: tl.constexpr,
                COLS: tl.constexpr):  # fmt: skip
    """Store the sum of all ranks' x in y; each program has some columns."""
    call, rank = fd.begin_call(window), fd.my_pe(window)
    box += (call & 1) * WORLD * rows * cols
    row, col = tl.arange(0, ROWS), tl.program_id(0) * COLS + tl.arange(0, COLS)
    at, inside = row[:, None] * cols + col[None, :], (row < rows)[:, None] & (col < cols)[None, :]
    values = tl.load(x + at, inside, 0)
    for pe in tl.static_range(WORLD):
        fd.mailbox.put(box + rank * rows * cols + at, values, pe, call, window, inside)
    fd.end_call(call, window)
    total, _ = fd.mailbox.take_sum(box + at, rows * cols, call, window, inside, WORLD)
    tl.store(y + at, total.to(y.dtype.element_ty), inside)


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
