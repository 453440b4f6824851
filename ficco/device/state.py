"""What a kernel reads of its window's table: ranks, the time limit, the status; and the time."""

from __future__ import annotations

import time

import triton
import triton.language as tl

from ficco.device import layout
from ficco.kernels import signals

_RANK = tl.constexpr(layout.RANK)
_WORLD = tl.constexpr(layout.WORLD)
_TIMEOUT_NS = tl.constexpr(layout.TIMEOUT_NS)
_STATE = tl.constexpr(layout.STATE)
_STATUS = tl.constexpr(layout.STATUS)


@triton.jit
def _probe():
    """Do nothing; its type says whether Triton interprets or compiles."""


on_gpu = tl.constexpr(isinstance(_probe, triton.JITFunction))

if on_gpu:

    @triton.jit
    def now_ns():
        """Return a time in ns."""
        return signals.now_ns(True)

else:
    from ficco.core.private.triton_interpreter import let_comparisons_mask, let_loops_count

    let_comparisons_mask()
    let_loops_count()

    def now_ns():
        """Return a time in ns. Waits call it, so other processes get the processor meanwhile."""
        time.sleep(2e-5)
        return tl.full((), time.monotonic_ns(), tl.int64)


@triton.jit
def my_pe(window):
    """Return this rank, int32."""
    return tl.load(window + _RANK).to(tl.int32)


@triton.jit
def n_pes(window):
    """Return the number of ranks, int32."""
    return tl.load(window + _WORLD).to(tl.int32)


@triton.jit
def timeout_of(window):
    """Return the longest time that a wait may last, int64, in ns."""
    return tl.load(window + _TIMEOUT_NS)


@triton.jit
def status_of(window):
    """Return a pointer to the window's status, int32.

    It is 0 until a wait of this rank gives up. Then all other waits of this rank read their word
    once, and give up, too.
    """
    return tl.load(window + _STATE).to(tl.pointer_type(tl.int32)) + _STATUS


@triton.jit
def fail(number, window):
    """Set the window's status to a number other than 0, unless a wait has given up earlier."""
    tl.atomic_cas(status_of(window), 0, number, sem="relaxed", scope="sys")
