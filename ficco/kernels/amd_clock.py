"""The constant clock of AMD's devices, in Triton. Device code only."""

from __future__ import annotations

import triton
import triton.language as tl

# The clock is read by the scalar memory path, so the wait is for the counter lgkmcnt. Triton's own
# `memrealtime` waits for vmcnt, so that the next instruction may read the register too early.
_READ = tl.constexpr("s_memrealtime $0\ns_waitcnt lgkmcnt(0)")


@triton.jit
def ticks():
    """Return the clock's time as int64. Its rate is an attribute of the device."""
    return tl.inline_asm_elementwise(_READ, "=s", [], tl.int64, is_pure=False, pack=1)
