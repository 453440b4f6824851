"""Giving the window back, from inside the launch that has read it last. Device code only.

The programs of a launch count each other as they end. The last one, which knows that all have read
what they read, clears the rank's words of the call and raises its `free` at every peer: 64 words at
a time. No program waits, so this needs no room on the device that the launch does not have.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.signal_sets import raise_words
from ficco.problem import MAX_WORLD

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
    WORLD: tl.constexpr,  # noqa: N803 - Triton's way to mark constants
    ON_GPU: tl.constexpr,  # noqa: N803
):
    """Clear `count` words, then raise a word at every peer, if this program is the last to end.

    Of no peers nothing is done. To be called once by every program, behind all that it reads.

    words, cleared, homes, ended: pointers, see `LeavingTable`; copy: int32, of the window.
    WORLD: ranks; only the interpreter looks at it.
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
