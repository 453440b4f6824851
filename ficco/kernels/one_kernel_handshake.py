"""The handshake of a call on windows, inside the call's single launch. Device code only.

The first program of a launch is the door: only it waits until the peers' windows are free and the
peers have entered. It notifies the other programs by gates in device memory. It runs whenever any
other program does. The last program to end releases the own window.

    gates   OPEN, MET (1, or 2 for never), programs that ended, and a word that the kernel may
            use; all 0 between launches
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.signals import await_words, raise_words
from ficco.plan import Signal, signal_place
from ficco.plan.tables import GATES

__all__ = ["MET", "OPEN", "give_back", "leave", "meet", "open_window", "tell"]

OPEN, MET, _DONE = (tl.constexpr(i) for i in range(3))
_GATES = tl.constexpr(GATES)
_ENTERED = tl.constexpr(signal_place(Signal(0, "entered", 0)))
_FREE = tl.constexpr(signal_place(Signal(0, "free", 0)))


@triton.jit
def open_window(  # noqa: PLR0913 - a kernel's arguments are its interface
    places,
    words,
    gates,
    stop,
    status,
    rank,
    peers,
    digest,
    patience_ns,
    WORLD: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Wait for and clear every peer's `free`, open the gate, enter; return 1, or 0 if it gave up.

    places: addresses of each rank's words; words: this rank's; the rest as in the kernels.
    """
    everyone = tl.arange(0, 64)
    of_peers = ((peers >> everyone) & 1) != 0
    opened = await_words(words + _FREE, 1, peers, 1, gates, stop, patience_ns, False, WORLD, ON_GPU)
    tl.store(words + _FREE + everyone, tl.zeros_like(everyone), mask=of_peers & (opened != 0))
    tl.debug_barrier()
    tl.atomic_xchg(gates + OPEN, 2 - opened, sem="release", scope="gpu")
    if opened != 0:
        raise_words(places, _ENTERED + rank, peers, digest, WORLD, ON_GPU)
    else:
        tl.store(status, _FREE + 1)
    return opened


@triton.jit
def meet(  # noqa: PLR0913
    words,
    gates,
    stop,
    status,
    peers,
    digest,
    patience_ns,
    WORLD: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Wait for and clear every peer's `entered`, set the gate; return 1, or 0 if it gave up."""
    everyone = tl.arange(0, 64)
    of_peers = ((peers >> everyone) & 1) != 0
    met = await_words(
        words + _ENTERED, 1, peers, digest, gates, stop, patience_ns, False, WORLD, ON_GPU
    )
    tl.store(words + _ENTERED + everyone, tl.zeros_like(everyone), mask=of_peers & (met != 0))
    tl.atomic_xchg(gates + MET, 2 - met, sem="release", scope="gpu")
    if met == 0:
        tl.store(status, _ENTERED + 1)
    return met


@triton.jit
def leave(gates):
    """End a program's part of the call; return how many programs had ended before."""
    tl.debug_barrier()
    return tl.atomic_add(gates + _DONE, 1, sem="acq_rel", scope="gpu")


@triton.jit
def give_back(
    places,
    gates,
    rank,
    peers,
    WORLD: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Raise `free` at every peer, if the call took place; all programs have finished reading."""
    held = (tl.load(gates + OPEN) == 1) & (tl.load(gates + MET) == 1)
    tl.debug_barrier()
    tl.store(gates + tl.arange(0, _GATES), tl.zeros((_GATES,), tl.int32))
    if held:
        raise_words(places, _FREE + rank, peers, 1, WORLD, ON_GPU)


@triton.jit
def tell(status, told):
    """Report a word that did not arrive, unless another, which is more specific, is reported."""
    if tl.load(status, volatile=True) == 0:
        tl.store(status, told)
