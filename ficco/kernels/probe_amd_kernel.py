"""The kernels by which AMD's devices are probed. Device code only; see `probe_code`."""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.amd_clock import ticks

_LOADED = tl.constexpr(1024)  # words that a program compares at a time


@triton.jit
def ficco_hold(begun, go, limit: tl.int64):
    """Occupy thread slots until the host says so: each program sets its word of `begun` to 1.

    All threads of a program wait for the one that polls.

    begun, go: int32 words of the host. limit: ticks of the constant clock, after which the kernel
    ends by itself.
    """
    begin = ticks()
    tl.store(begun + tl.program_id(0), 1, cache_modifier=".wt")
    waits = tl.atomic_or(go, 0, sem="relaxed", scope="sys") == 0
    while waits:
        early = ticks() - begin <= limit
        waits = early & (tl.atomic_or(go, 0, sem="relaxed", scope="sys") == 0)


@triton.jit
def ficco_compare_words(data, count: tl.int64, value: tl.int64, wrong):
    """Add the number of words that differ from `value` to the word `wrong`, once per program.

    The loads are those of any kernel, which caches may serve. Every program reads all words, so
    that every part of the device does.

    data, wrong: int32 words of the device. count: number of words. value: in its lower 32 bits.
    """
    differing = tl.zeros((_LOADED,), tl.int32)
    for begin in tl.range(0, count, _LOADED):
        place = begin + tl.arange(0, _LOADED)
        there = place < count
        seen = tl.load(data + place, mask=there, other=0)
        differing += (there & (seen != value.to(tl.int32))).to(tl.int32)
    total = tl.sum(differing, 0)
    if total != 0:
        tl.atomic_add(wrong, total, sem="relaxed", scope="sys")
