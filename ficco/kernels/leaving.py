"""Giving the window back, from inside the launch that has read it last. Device code, and its table.

The programs of a launch count each other as they end. The last one, which knows that all have read
what they read, clears the rank's words of the call and raises its `free` at every peer. As commands
of a stream that would be a word after another, 0.7 us each; here it is 64 at a time, and nothing
waits in between. No program waits, so this needs no room on the device that
the launch does not have.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ficco.kernels.many_words import raise_words
from ficco.kernels.one_launch import ranks_as_bits
from ficco.kernels.parts import Leaving
from ficco.kernels.placing import on_device
from ficco.problem import MAX_WORLD

__all__ = ["LeavingTable", "give_window_back", "leaving_table"]

_AT_A_TIME = tl.constexpr(64)
_MOST = tl.constexpr(MAX_WORLD)


class LeavingTable(NamedTuple):
    """What the kernel reads of words that it clears and raises.

    Attributes:
        cleared: int32, indices of own words; `cleared_count` of them.
        homes: int64 [2, MAX_WORLD]: where each rank's words begin, by copy of the window.
        ended: int32 [1], programs that have ended; 0 between launches, which must not overlap.
        raised: index of the word that is raised at peers.
        peers: a bit each.
        world: ranks up to the last peer.
    """

    cleared: torch.Tensor
    cleared_count: int
    homes: torch.Tensor
    ended: torch.Tensor
    raised: int
    peers: int
    world: int


def leaving_table(leaving: Leaving, device: torch.device) -> LeavingTable:
    """Return the table of a launch's last words.

    Copies to the device, so not while a stream waits or is captured.

    Args:
        leaving: which words.
        device: the GPU; or the CPU, for Triton's interpreter.
    """
    rows = [[*ranks, *[0] * (MAX_WORLD - len(ranks))] for ranks in leaving.homes]
    return LeavingTable(
        cleared=on_device(list(leaving.cleared) or [0], torch.int32, device),
        cleared_count=len(leaving.cleared),
        homes=on_device(rows, torch.int64, device),
        ended=on_device([0], torch.int32, device),
        raised=leaving.raised,
        peers=ranks_as_bits(leaving.peers),
        world=max(leaving.peers, default=0) + 1,
    )


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
