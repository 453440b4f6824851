"""Waiting inside a kernel for a word that a peer's stream writes after the data it has copied.

All threads of a program get the same result. Data that the peer wrote before the word may be read
after it by ordinary loads and, if `FENCED`, by bulk (TMA) loads. It must not be used in a
warp-specialized kernel, whose warps do not meet at the barrier.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["await_if"]

# One statement, so that the spin of a single thread is hidden from the compiler. The barrier joins
# the threads and distributes whether the first one gave up. $0 = 1 if the word arrived or there is
# no wait, $1 = the word, $2 = the stop word, $3 = the value, $4 = timeout in ns, $5 = whether to
# wait, $6 = the status word, $7 = the number to raise it to; once the status is not 0, no wait
# continues. There is no branch visible to the compiler, and no dependence between waits, so that
# the compiler may merge loops.
_SPIN = """{
    .reg .pred idle, first;
    .reg .b32 told;
    mov.u32 $0, 1;
    setp.eq.u32 idle, $5, 0;
    @idle bra through;
    .reg .pred other, came, gave_up;
    .reg .b32 thread, seen, stopped;
    .reg .b64 begin, now;
    setp.ne.u32 gave_up, 0, 0;
    mov.u32 thread, %tid.x;
    setp.ne.u32 other, thread, 0;
    @other bra together;
    mov.u64 begin, %globaltimer;
again:
    ld.relaxed.sys.global.u32 stopped, [$2];
    ld.relaxed.sys.global.u32 told, [$6];
    or.b32 stopped, stopped, told;
    ld.acquire.sys.global.u32 seen, [$1];
    setp.eq.u32 came, seen, $3;
    @came bra together;
    mov.u64 now, %globaltimer;
    sub.u64 now, now, begin;
    setp.gt.u64 gave_up, now, $4;
    setp.ne.or.u32 gave_up, stopped, 0, gave_up;
    @!gave_up bra again;
together:
    barrier.red.or.pred gave_up, 0, gave_up;
    selp.u32 $0, 0, 1, gave_up;
    setp.eq.and.u32 first, thread, 0, gave_up;
    @first red.relaxed.sys.global.max.s32 [$6], $7;
"""

# Bulk loads use a separate proxy, for which the acquire has no effect without the fence.
_ASM = tl.constexpr(_SPIN + "through:\n}")
_FENCED_ASM = tl.constexpr(_SPIN + "    fence.proxy.async.global;\nthrough:\n}")


@triton.jit
def await_if(  # noqa: PLR0913 - a wait has as many facts
    asked,
    word,
    value,
    stop,
    patience_ns,
    status,
    number,
    FENCED: tl.constexpr,  # noqa: N803 - Triton's way to mark constants
    ON_GPU: tl.constexpr,  # noqa: N803
):
    """Return 1 once the word has the value, 0 if the wait gives up; 1 at once if `asked` is false.

    One thread spins; the others wait at a barrier. It gives up when the word `stop` is not 0 or
    after the timeout, but reads the word at least once. Then the word `status` becomes the maximum
    of itself and `number`, and every later wait reads its word once. The interpreter has no clock:
    it gives up only by `stop`.

    Args:
        asked: whether to wait, the same in all threads.
        word: pointer to int32.
        value: int32.
        stop: pointer to int32.
        patience_ns: int64, timeout.
        status: pointer to int32.
        number: int32, more than 0.
        FENCED: whether bulk loads follow.
        ON_GPU: False in the interpreter, which has no inline assembly.
    """
    if ON_GPU:
        asm: tl.constexpr = _FENCED_ASM if FENCED else _ASM
        came = tl.inline_asm_elementwise(
            asm, "=&r,l,l,r,l,r,l,r,~{memory}",
            [word, stop, value, patience_ns, asked.to(tl.int32), status, number],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        came = 1
        if asked:
            stopped = tl.load(stop)
            seen = tl.load(word)
            while (seen != value) & (stopped == 0):
                stopped = tl.load(stop)
                seen = tl.load(word)
            came = (seen == value).to(tl.int32)
            if came == 0:
                tl.atomic_max(status, number, sem="relaxed", scope="sys")
    return came
