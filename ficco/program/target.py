"""Target: what a device, its driver and its array library do. Passes compile plans for a target.

A target is no part of a plan's digest: peers see only windows and signals, so ranks with different
targets can share a call. Calls with mailboxes are an exception: they need kernels on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ficco.operators.problem_checks import MAX_WORLD

LEFT_TO_COPIES = 4  # multiprocessors that launches which wait leave free, if ranks share a device
FEWEST_STORED = 3  # from this many signals on, one kernel is faster than stream writes
# Signals that one kernel stores: kMostStored of the native core, less one for the watchdog's word.
MOST_STORED = 127


class Target(NamedTuple):
    """What compiled programs depend on.

    Attributes:
        name: "host", "cuda", "hip" or "library".
        kernels: whether there are ficco's own kernels: gated GEMMs, sums of slots in one pass, bags
            of several tables, and whole calls as one launch. Without them a gated step becomes
            waits, products and signals.
        threads: whether lanes are threads, which get all their entries at the start of a call;
            otherwise they are streams, which get entries in the order of the program.
        in_order: whether all entries run one after another, so that lanes are not concurrent.
        batches: whether the library has strided-batched GEMMs, and sums of slots in one pass.
        writable: per rank, whether streams write to its signals; empty: to all. Signals that no
            stream writes to are raised by 4-byte copies.
        store_from: on the caller's stream, the fewest signals that one kernel stores, instead of
            the stream; 0: there is no such kernel.
        wait: how a device waits for signals: "stream": a memory operation of a lane's stream; or
            "kernel": a kernel of one block on the caller's stream, which gives up in time by
            itself. Then other lanes wait for the end of that kernel. Threads wait by themselves.
        copies_2d: whether one copy moves rows that are not adjacent. Otherwise each row of a part
            of the columns is a copy, and rows of whole buffers are adjacent: engines pack others.
        collectives: whether a library runs the program, with collectives in place of copies between
            ranks and signals.
        gathers: whether a kernel runs a gated step whose parts only wait, though there are no
            other kernels. Its launch does not release the window, and reports a signal that it
            misses by itself.
        leaves: multiprocessors that a launch which waits for signals leaves free. If ranks share a
            device, kernels make the copies between them. A launch that took all multiprocessors
            would hold back this rank's own copies, for which a peer waits before it sends what
            the launch waits for. Processes that share a device without MPS take turns, so
            each has all multiprocessors in its turn.
    """

    name: str
    kernels: bool
    threads: bool = False
    batches: bool = True
    writable: tuple[bool, ...] = ()
    store_from: int = 0
    wait: str = "stream"
    copies_2d: bool = True
    in_order: bool = False
    collectives: bool = False
    gathers: bool = False
    leaves: int = 0

    def writes_to(self, rank: int) -> bool:
        """Return whether streams write to the signals of a rank."""
        return not self.writable or self.writable[rank]


# PyTorch and torch.distributed run whole calls on the caller's stream or thread.
LIBRARY = Target("library", kernels=False, batches=False, in_order=True, collectives=True)
HOST = Target("host", kernels=False, threads=True, batches=False)


def own_signals(rank: int) -> tuple[bool, ...]:
    """Return `Target.writable` for a driver that allows stream writes only to a rank's own memory.

    Args:
        rank: whose streams write.
    """
    return tuple([other == rank for other in range(MAX_WORLD)])


def hip_target(*, kernels: bool = False, copies_2d: bool = False, gathers: bool = True) -> Target:
    """Return the target of an AMD device.

    All signals are 4-byte copies by copy engines, and waits are kernels.

    Args:
        kernels: see `Target`. Plans are predicted with kernels, of which the engine has one.
        copies_2d: see `Target`. Plans are predicted with such copies.
        gathers: see `Target`; if there are kernels, it has no effect.
    """
    nowhere = (False,) * MAX_WORLD
    return Target(
        "hip", kernels, writable=nowhere, wait="kernel", copies_2d=copies_2d,
        gathers=gathers and not kernels,
    )  # fmt: skip


def cuda_target(
    writable: Sequence[bool] = (),
    *,
    kernels: bool = True,
    stores: bool = True,
    wait: str = "stream",
    shared: bool = False,
) -> Target:
    """Return the target of a CUDA device.

    Args:
        writable: see `Target`.
        kernels: whether the array library has ficco's kernels.
        stores: whether the device has a kernel that stores signals.
        wait: see `Target`.
        shared: whether another rank is on the same device.
    """
    listed = () if all(writable) else tuple(writable)
    return Target(
        "cuda", kernels, writable=listed, store_from=FEWEST_STORED * stores, wait=wait,
        leaves=LEFT_TO_COPIES * shared,
    )  # fmt: skip
