"""Waiting inside a kernel for several words at once, and raising several, one thread per word.

A read of a word takes a memory latency, and a word at a peer the latency of the link. A program
that read its peers' words one by one would wait for the sum of the latencies.

Sets of ranks are bits of a number. As in `signal_wait`, data that a peer wrote before its word may
be read after it by all threads of the program, by ordinary loads. Data that any thread of the
program wrote before words are raised are visible to readers of the words.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["await_all_words", "await_words", "find_words", "raise_found_words", "raise_words"]

# $0 = 1 if all words arrived; $1, $2 = address of the first word, bytes to the next; $3 = set of
# ranks; $4 = value; $5 = address of the gate, or 0; $6 = the stop word; $7 = timeout in ns. The
# thread after those of 64 ranks reads the gate, which becomes 1, or 2 for never.
_AWAIT = """{
    .reg .pred other, gate, came, gave_up;
    .reg .b32 thread, seen, stopped, want;
    .reg .b64 at, set, begin, now;
    setp.ne.u32 gave_up, 0, 0;
    mov.u32 thread, %tid.x;
    setp.eq.u32 gate, thread, 64;
    mul.wide.u32 at, thread, $2;
    add.u64 at, at, $1;
    mov.u32 want, $4;
    shr.u64 set, $3, thread;
    and.b64 set, set, 1;
    @gate mov.u64 at, $5;
    @gate mov.u64 set, $5;
    @gate mov.u32 want, 1;
    setp.eq.u64 other, set, 0;
    setp.gt.or.u32 other, thread, 64, other;
    @other bra together;
    mov.u64 begin, %globaltimer;
again:
    ld.acquire.sys.global.u32 seen, [at];
    setp.eq.u32 came, seen, want;
    @came bra together;
    setp.eq.and.u32 gave_up, seen, 2, gate;
    @gave_up bra together;
    ld.relaxed.sys.global.u32 stopped, [$6];
    mov.u64 now, %globaltimer;
    sub.u64 now, now, begin;
    setp.gt.u64 gave_up, now, $7;
    setp.ne.or.u32 gave_up, stopped, 0, gave_up;
    @!gave_up bra again;
together:
    barrier.red.or.pred gave_up, 0, gave_up;
    selp.u32 $0, 0, 1, gave_up;
}"""

# The same for several words per rank. There may be more words than threads: threads stride by the
# block size, and the gate is the last word. $2 = bytes from one rank's first word to the next
# rank's, $5 = words of a rank, $6 = ranks, $7 = address of the gate, $8, $9 = $6, $7 above.
_AWAIT_ALL = """{
    .reg .pred gate, absent, past, came, gave_up;
    .reg .b32 number, last, rank, chunk, every, seen, stopped, want;
    .reg .b64 at, more, begin, now;
    setp.ne.u32 gave_up, 0, 0;
    mov.u32 number, %tid.x;
    mov.u32 every, %ntid.x;
    mul.lo.u32 last, $5, $6;
    mov.u64 begin, %globaltimer;
next:
    setp.gt.u32 past, number, last;
    @past bra together;
    setp.eq.u32 gate, number, last;
    div.u32 rank, number, $5;
    rem.u32 chunk, number, $5;
    shr.u64 more, $3, rank;
    and.b64 more, more, 1;
    @gate mov.u64 more, 1;
    setp.eq.u64 absent, more, 0;
    @absent bra advance;
    mul.wide.u32 at, rank, $2;
    mul.wide.u32 more, chunk, 4;
    add.u64 at, at, more;
    add.u64 at, at, $1;
    mov.u32 want, $4;
    @gate mov.u64 at, $7;
    @gate mov.u32 want, 1;
again:
    ld.acquire.sys.global.u32 seen, [at];
    setp.eq.u32 came, seen, want;
    @came bra advance;
    setp.eq.and.u32 gave_up, seen, 2, gate;
    @gave_up bra together;
    ld.relaxed.sys.global.u32 stopped, [$8];
    mov.u64 now, %globaltimer;
    sub.u64 now, now, begin;
    setp.gt.u64 gave_up, now, $9;
    setp.ne.or.u32 gave_up, stopped, 0, gave_up;
    @!gave_up bra again;
    bra together;
advance:
    add.u32 number, number, every;
    bra next;
together:
    barrier.red.or.pred gave_up, 0, gave_up;
    selp.u32 $0, 0, 1, gave_up;
}"""

# $1 = address of the ranks' addresses; $2 = byte offset added to them; $3 = set of ranks;
# $4 = value.
_RAISE = """{
    .reg .pred mine;
    .reg .b32 thread;
    .reg .b64 at, set;
    barrier.sync 0;
    mov.u32 thread, %tid.x;
    shr.u64 set, $3, thread;
    and.b64 set, set, 1;
    setp.ne.u64 mine, set, 0;
    setp.lt.and.u32 mine, thread, 64, mine;
    mul.wide.u32 at, thread, 8;
    add.u64 at, at, $1;
    @mine ld.global.u64 at, [at];
    add.u64 at, at, $2;
    @mine st.release.sys.global.u32 [at], $4;
    mov.u32 $0, 0;
}"""

# The two parts of it. $0 = address of the words of this thread's rank, or 0; $1 = address of the
# ranks' addresses; $2 = set of ranks.
_FIND = """{
    .reg .pred mine;
    .reg .b32 thread;
    .reg .b64 at, set;
    mov.u32 thread, %tid.x;
    shr.u64 set, $2, thread;
    and.b64 set, set, 1;
    setp.ne.u64 mine, set, 0;
    setp.lt.and.u32 mine, thread, 64, mine;
    mul.wide.u32 at, thread, 8;
    add.u64 at, at, $1;
    mov.u64 $0, 0;
    @mine ld.global.u64 $0, [at];
}"""

# $1 = address of the words of this thread's rank, or 0; $2 = byte offset added to it; $3 = value.
_RAISE_FOUND = """{
    .reg .pred mine;
    .reg .b64 at;
    barrier.sync 0;
    setp.ne.u64 mine, $1, 0;
    add.u64 at, $1, $2;
    @mine st.release.sys.global.u32 [at], $3;
    mov.u32 $0, 0;
}"""

_AWAIT_ASM = tl.constexpr(_AWAIT)
_AWAIT_ALL_ASM = tl.constexpr(_AWAIT_ALL)
_RAISE_ASM = tl.constexpr(_RAISE)
_FIND_ASM = tl.constexpr(_FIND)
_RAISE_FOUND_ASM = tl.constexpr(_RAISE_FOUND)


@triton.jit
def await_words(  # noqa: PLR0913 - a kernel's arguments are its interface
    words,
    stride,
    ranks,
    value,
    gate,
    stop,
    patience_ns,
    GATED: tl.constexpr,  # noqa: N803 - Triton's way to mark constants
    WORLD: tl.constexpr,  # noqa: N803
    ON_GPU: tl.constexpr,  # noqa: N803
):
    """Return 1 once the words of all these ranks have the value and the gate is 1, else 0.

    It gives up when the word `stop` is not 0, after the timeout, or when the gate is 2. Every word
    is read at least once. The interpreter has no clock: it gives up only by `stop`. A program must
    have three warps or more.

    Args:
        words: pointer to int32, the word of rank 0.
        stride: int32, words from one rank's word to the next rank's.
        ranks: int64, a set.
        value: int32.
        gate: pointer to int32, if GATED.
        stop: pointer to int32.
        patience_ns: int64, timeout.
        GATED: whether there is a gate.
        WORLD: number of ranks.
        ON_GPU: False in the interpreter, which has no inline assembly.
    """
    if ON_GPU:
        if GATED:  # noqa: SIM108
            at_gate = gate.to(tl.int64)
        else:
            at_gate = tl.full((), 0, tl.int64)
        came = tl.inline_asm_elementwise(
            _AWAIT_ASM, "=r,l,r,l,r,l,l,l,~{memory}",
            [words, stride * 4, ranks, value, at_gate, stop, patience_ns],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        came = tl.full((), 1, tl.int32)
        for rank in tl.static_range(WORLD + 1):
            at = words + rank * stride
            want = value
            wanted = (ranks >> rank) & 1
            if rank == WORLD:
                at = gate
                want = tl.full((), 1, tl.int32)
                wanted = tl.full((), 1 if GATED else 0, tl.int64)
            if wanted != 0:
                stopped = tl.load(stop)
                seen = tl.load(at)
                while (seen != want) & (stopped == 0) & ((rank < WORLD) | (seen != 2)):
                    stopped = tl.load(stop)
                    seen = tl.load(at)
                came = came & (seen == want).to(tl.int32)
    return came


@triton.jit
def await_all_words(  # noqa: PLR0913
    words,
    stride,
    count,
    ranks,
    value,
    gate,
    stop,
    patience_ns,
    WORLD: tl.constexpr,  # noqa: N803
    ON_GPU: tl.constexpr,  # noqa: N803
):
    """Return 1 once all these words of these ranks have the value and the gate is 1, else 0.

    Like `await_words`, but a thread that gives up does not read its later words.

    Args:
        words: pointer to int32, the first word of rank 0; the words of a rank are contiguous.
        stride: int32, words from one rank's first word to the next rank's.
        count: int32, words of a rank, 1 or more.
        ranks: int64, a set.
        value: int32.
        gate: pointer to int32.
        stop: pointer to int32.
        patience_ns: int64, timeout.
        WORLD: number of ranks.
        ON_GPU: False in the interpreter.
    """
    if ON_GPU:
        world = tl.full((), WORLD, tl.int32)
        came = tl.inline_asm_elementwise(
            _AWAIT_ALL_ASM, "=r,l,r,l,r,r,r,l,l,l,~{memory}",
            [words, stride * 4, ranks, value, count, world, gate, stop, patience_ns],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        came = tl.full((), 1, tl.int32)
        for rank in tl.static_range(WORLD + 1):
            wanted = (ranks >> rank) & 1
            many = count
            want = value
            if rank == WORLD:
                wanted = tl.full((), 1, tl.int64)
                many = tl.full((), 1, tl.int32)
                want = tl.full((), 1, tl.int32)
            if wanted != 0:
                for chunk in tl.range(many):
                    at = words + rank * stride + chunk
                    if rank == WORLD:
                        at = gate
                    stopped = tl.load(stop)
                    seen = tl.load(at)
                    while (seen != want) & (stopped == 0) & ((rank < WORLD) | (seen != 2)):
                        stopped = tl.load(stop)
                        seen = tl.load(at)
                    came = came & (seen == want).to(tl.int32)
    return came


@triton.jit
def raise_words(
    addresses,
    place,
    ranks,
    value,
    WORLD: tl.constexpr,  # noqa: N803
    ON_GPU: tl.constexpr,  # noqa: N803
):
    """Set a word at each of these ranks, after all earlier writes of the program.

    Args:
        addresses: pointer to int64, address of each rank's words.
        place: int32, index of the word.
        ranks: int64, a set.
        value: int32.
        WORLD: number of ranks.
        ON_GPU: False in the interpreter.
    """
    if ON_GPU:
        tl.inline_asm_elementwise(
            _RAISE_ASM, "=r,l,l,l,r,~{memory}",
            [addresses, place.to(tl.int64) * 4, ranks, value],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        for rank in tl.static_range(WORLD):
            if ((ranks >> rank) & 1) != 0:
                word = tl.load(addresses + rank).to(tl.pointer_type(tl.int32)) + place
                tl.atomic_xchg(word, value, sem="release", scope="sys")


@triton.jit
def find_words(addresses, ranks, ON_GPU: tl.constexpr):  # noqa: N803
    """Load the addresses of the words of these ranks, for `raise_found_words`.

    Each thread has its own result: thread t has the address of rank t's words, or 0 if the rank is
    not in the set. A program must only pass it on. A launch that raises words several times loads
    the addresses once.

    Args:
        addresses: pointer to int64, address of each rank's words.
        ranks: int64, a set.
        ON_GPU: False in the interpreter.
    """
    if ON_GPU:
        found = tl.inline_asm_elementwise(
            _FIND_ASM, "=l,l,l", [addresses, ranks], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        found = tl.full((), 0, tl.int64)
    return found


@triton.jit
def raise_found_words(
    found,
    addresses,
    place,
    ranks,
    value,
    WORLD: tl.constexpr,  # noqa: N803
    ON_GPU: tl.constexpr,  # noqa: N803
):
    """Set a word at each of these ranks like `raise_words`; `found` is from `find_words`."""
    if ON_GPU:
        tl.inline_asm_elementwise(
            _RAISE_FOUND_ASM, "=r,l,l,r,~{memory}", [found, place.to(tl.int64) * 4, value],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        raise_words(addresses, place, ranks, value, WORLD, ON_GPU)
