"""Release of the window from inside the launch that reads it last. Device code only.

The programs of a launch count their ends. When the last one ends, all have finished reading. It
clears the rank's words of the call, 64 at a time, and raises its `free` at every peer. No program
waits, so the release needs no extra room on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.signals import raise_words
from ficco.operators.problem_checks import MAX_WORLD

__all__ = ["give_window_back"]

_AT_A_TIME = tl.constexpr(64)
_MOST = tl.constexpr(MAX_WORLD)


@triton.jit
def give_window_back(  # noqa: PLR0913 - a kernel's arguments are its interface
    words,
    cleared,
    count,
    homes,
    copy,
    ended,
    raised,
    peers,
    WORLD: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Clear `count` words, then raise a word at every peer, if this program is the last to end.

    Without peers it does nothing. Every program must call it once, after all its reads.

    words, cleared, homes, ended: pointers, see `ReleaseTable`; copy: int32, of the window.
    WORLD: number of ranks; only the interpreter reads it.
    """
    if peers != 0:
        tl.debug_barrier()
        before = tl.atomic_add(ended, 1, sem="acq_rel", scope="gpu")
        if before == tl.num_programs(0) - 1:
            tl.store(ended, 0)
            for first in tl.range(0, count, _AT_A_TIME):
                at = first + tl.arange(0, _AT_A_TIME)
                word = tl.load(cleared + at, mask=at < count, other=0)
                tl.store(words + word, tl.zeros_like(word), mask=at < count)
            raise_words(homes + copy * _MOST, raised, peers, 1, WORLD, ON_GPU)
