"""Triton functions that count the calls of a window, and that chain launches."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ficco.device import layout
from ficco.device.state import on_gpu
from ficco.kernels.signal_ptx import met

_STATE = tl.constexpr(layout.STATE)
_STATUS = tl.constexpr(layout.STATUS)
_CALLS = tl.constexpr(layout.CALLS)
_DRAWN = tl.constexpr(layout.DRAWN)

# $0 = the call, or -1 if a thread saw a failure; $1 = the call, $2 = the status that a thread saw.
_BEGIN_CALL_ASM = tl.constexpr(f"""{{
    .reg .pred failed;
    setp.ne.s32 failed, $2, 0;
    {met("failed")}
    selp.b32 $0, -1, $1, failed;
}}""")

# $1 = the count of calls, $2 = the count of programs, $3 = the call, $4 = programs of the launch.
# The barrier uses the call, so that all threads have read it.
_END_CALL_ASM = tl.constexpr("""{
    .reg .pred first, last;
    .reg .b32 thread, seen;
    setp.ge.s32 first, $3, 0;
    barrier.red.and.pred first, 0, first;
    mov.u32 thread, %tid.x;
    setp.eq.and.u32 first, thread, 0, first;
    mov.u32 seen, $4;
    @first atom.relaxed.gpu.global.add.u32 seen, [$2], 1;
    add.u32 seen, seen, 1;
    setp.eq.and.u32 last, seen, $4, first;
    add.u32 seen, $3, 1;
    and.b32 seen, seen, 0x7fffffff;
    @last st.relaxed.gpu.global.u32 [$2], 0;
    @last st.relaxed.gpu.global.u32 [$1], seen;
    mov.u32 $0, 0;
}""")


@triton.jit
def begin_call(window):
    """Return the number of this call of the window, int32, the same in all threads of the program.

    Calls count from 0, also when a CUDA graph is replayed. All programs of a launch call it once,
    and `end_call` later; launches on one window do not overlap. A negative number means that a wait
    of this rank has given up: peers may still be in an earlier call, so store nothing.

    Programs of a launch get the same number, with one exception: if a wait gives up in this launch,
    programs that start later get a negative number. So use the sign only in masks. Do not skip
    `signal`, `wait` or `barrier` by it, because other programs and ranks wait for them.
    """
    state = tl.load(window + _STATE).to(tl.pointer_type(tl.int32))
    number = tl.load(state + _CALLS, volatile=True)
    status = tl.load(state + _STATUS, volatile=True)
    if on_gpu:
        call = tl.inline_asm_elementwise(
            _BEGIN_CALL_ASM, "=r,r,r,~{memory}", [number, status],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        call = tl.where(status == 0, number, -1)
    return call


@triton.jit
def end_call(call, window):
    """Count this program; the last program of the launch counts the call. It orders nothing.

    Call it once, after `begin_call`, and before the waits, which hide its latency.

    Args:
        call: the result of `begin_call`.
        window: the table.

    Example:
        ``fd.end_call(call, window)``
    """
    state = tl.load(window + _STATE).to(tl.pointer_type(tl.int32))
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    if on_gpu:
        tl.inline_asm_elementwise(
            _END_CALL_ASM, "=r,l,l,r,r,~{memory}",
            [state + _CALLS, state + _DRAWN, call, programs],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    elif call >= 0:
        drawn = tl.atomic_add(state + _DRAWN, 1)
        if drawn + 1 == programs:
            tl.store(state + _DRAWN, 0)
            tl.store(state + _CALLS, (call + 1) & 0x7FFFFFFF)


@tl.core.builtin
def _can_follow_early(_semantic=None):
    """Return whether the GPU that the kernel is compiled for has programmatic dependent launch."""
    arch = _semantic.builder.options.arch  # such as "sm90"; target_info knows the current GPU alone
    return tl.constexpr(int(arch.removeprefix("sm")) >= 90)


@triton.jit
def after_previous_launch():
    """Wait until the previous kernel of the stream has ended, in a launch with `launch_pdl=True`.

    Call it first, before anything is read or written. In other launches it does nothing. GPUs of
    compute capability below 9.0 have no such launches: compiled for them, it is empty.
    """
    if on_gpu and _can_follow_early():
        gdc_wait()
