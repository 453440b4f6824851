"""The kernel by which AMD's devices wait for signals. Device code only.

Streams of HIP wait by kernels that poll without a limit. This kernel ends by itself when a stop
word is set or after a time, and tells which word is missing. One code object per architecture
serves every call; see `ficco.cli.packing.amd`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.amd_clock import ticks
from ficco.kernels.amd_code import AWAITED

_WORDS = tl.constexpr(AWAITED)
_FILLED = tl.constexpr(1024)  # words that a program fills at a time


@triton.jit
def _fill(address, size, value):
    """Store a value in all words of a range of `size` bytes; programs stride over the range."""
    words = size // 4
    at = address.to(tl.pointer_type(tl.int32))
    for begin in tl.range(tl.program_id(0) * _FILLED, words, tl.num_programs(0) * _FILLED):
        place = begin + tl.arange(0, _FILLED).to(tl.int64)
        tl.store(at + place, tl.full((_FILLED,), 0, tl.int32) + value, mask=place < words)


@triton.jit
def ficco_await_words(  # noqa: PLR0913 - a kernel's arguments are its interface
    at,
    values,
    numbers,
    stop,
    lane,
    missed,
    first,
    second,
    size: tl.int64,
    limit: tl.int64,
    mark: tl.int32,
    count: tl.int32,
):
    """Wait until `count` words have their values; there is a program for each L2 of the device.

    Each program acquires every word, so that what was written before the words is visible to later
    kernels on all parts of the device. A program gives up when the word `stop` is not 0, or after
    `limit` ticks of the constant clock. Then it raises the word `missed` to the largest number of a
    missing word, and sets all bits of two ranges of `size` bytes, which are NaN.

    at: int64 tuple, addresses of int32 words. values, numbers: of each word.
    stop, lane, missed: int32 words that the host also uses. The word `lane` is `mark` from the
    begin of the kernel to its end, and then 0.
    first, second: int64, addresses of the ranges.
    """
    place = tl.arange(0, _WORDS)
    words = tl.zeros((_WORDS,), tl.int64)
    wanted = tl.zeros((_WORDS,), tl.int32)
    number = tl.zeros((_WORDS,), tl.int32)
    for i in tl.static_range(_WORDS):
        words = tl.where(place == i, at[i], words)
        wanted = tl.where(place == i, values[i], wanted)
        number = tl.where(place == i, numbers[i], number)
    pointers = words.to(tl.pointer_type(tl.int32))
    leads = tl.program_id(0) == 0
    if leads:
        tl.atomic_xchg(lane, mark, sem="relaxed", scope="sys")
    missing = place < count
    left = tl.max(tl.where(missing, number, 0), 0)
    gave_up = tl.full((), 0, tl.int32)
    begin = ticks()
    while (left != 0) & (gave_up == 0):
        seen = tl.atomic_or(pointers, 0, mask=missing, sem="acquire", scope="sys")
        missing = missing & (seen != wanted)
        left = tl.max(tl.where(missing, number, 0), 0)
        stopped = tl.atomic_or(stop, 0, sem="relaxed", scope="sys")
        late = ticks() - begin > limit
        gave_up = ((stopped != 0) | late).to(tl.int32)
    if left != 0:
        tl.atomic_max(missed, left, sem="relaxed", scope="sys")
        _fill(first, size, -1)
        _fill(second, size, -1)
    if leads:
        tl.atomic_xchg(lane, 0, sem="release", scope="sys")
