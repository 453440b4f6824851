"""Signals in device code: waiting for words that peers write, and raising and counting words.

All threads of a program call a function together. They meet at a barrier, so no function may be
used in a warp-specialized kernel. All threads get the result of a wait. Data that a peer wrote
before its word may be read after the wait by ordinary loads. Data that any thread of the program
stored before a word is raised are visible to readers of the word.

A wait gives up when a stop word is not 0 or after the timeout, but reads every word at least once.
The interpreter has no clock: it gives up only by stop words.

A read of a word takes a memory latency, and a word at a peer the latency of the link. A program
that read its peers' words one by one would wait for the sum of the latencies. So functions for
several words have a thread for each. Sets of ranks are bits of a number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.signal_ptx import clock, of_first, of_rank, raised, release, wait

__all__ = [
    "await_all_words", "await_if", "await_words", "count_tiles", "fence_bulk_loads", "find_words",
    "now_ns", "raise_found_words", "raise_words",
]  # fmt: skip

_NOW_ASM = tl.constexpr(clock("$0"))


def _await_if(fence: str) -> str:
    """Return the block of `await_if`, with a fence for all threads after the wait.

    $1 = the word, $2 = the stop word, $3 = the value, $4 = timeout in ns, $5 = whether to wait, $6
    = the status word, $7 = the number to raise it to. One thread spins. There is no dependence
    between waits, so that the compiler may merge loops.
    """
    return wait(
        f"""mov.u32 $0, 1;
    .reg .pred idle;
    setp.eq.u32 idle, $5, 0;
    @idle bra through;
    {of_first()}""",
        "$1", "setp.eq.u32 came, seen, $3;", ("$2", "$6"), "$4",
        after=f"""and.pred mine, mine, gave_up;
    @mine red.relaxed.sys.global.max.s32 [$6], $7;
    {fence}
through:""",
    )  # fmt: skip


_AWAIT_IF_ASM = tl.constexpr(_await_if(""))
# Bulk loads use a separate proxy, for which the acquire has no effect without the fence.
_FENCE = "fence.proxy.async.global;"
_FENCED_ASM = tl.constexpr(_await_if(_FENCE))
_FENCE_ASM = tl.constexpr(f"{{\n    {_FENCE}\n    mov.u32 $0, 0;\n}}")

_NEVER = "setp.eq.and.u32 gave_up, seen, 2, gate;"

# $1, $2 = address of the first word, bytes to the next; $3 = set of ranks; $4 = value; $5 =
# address of the gate, or 0; $6 = the stop word; $7 = timeout in ns. The thread after those of 64
# ranks reads the gate, which becomes 1, or 2 for never.
_AWAIT_ASM = tl.constexpr(wait(
    f"""{of_rank("$3", "$1", "$2")}
    .reg .pred gate;
    .reg .b32 want;
    mov.u32 want, $4;
    setp.eq.u32 gate, thread, 64;
    @gate setp.ne.u64 mine, $5, 0;
    @gate mov.u64 at, $5;
    @gate mov.u32 want, 1;""",
    "at", "setp.eq.u32 came, seen, want;", ("$6",), "$7", never=_NEVER,
))  # fmt: skip

# The same for several words per rank. There may be more words than threads: threads stride by the
# block size, and the gate is the last word. $2 = bytes from one rank's first word to the next
# rank's, $5 = words of a rank, $6 = ranks, $7 = address of the gate, $8, $9 = $6, $7 above. The
# assembler spills registers if the loop ends by a conditional branch.
_AWAIT_ALL_ASM = tl.constexpr(wait(
    """.reg .pred mine, gate, absent, past;
    .reg .b32 number, last, rank, chunk, every, want;
    .reg .b64 at, more;
    mov.u32 number, %tid.x;
    mov.u32 every, %ntid.x;
    mul.lo.u32 last, $5, $6;
    setp.eq.u32 mine, 0, 0;""",
    "at", "setp.eq.u32 came, seen, want;", ("$8",), "$9", arrived="advance", never=_NEVER,
    each="""
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
    @gate mov.u32 want, 1;""",
    missed="""bra together;
advance:
    add.u32 number, number, every;
    bra next;""",
))  # fmt: skip

# $1 = address of the ranks' addresses; $2 = byte offset added to them; $3 = set of ranks;
# $4 = value.
_RAISE_ASM = tl.constexpr(raised(
    f"""{of_rank("$3", "$1", "8")}
    @mine ld.global.u64 at, [at];
    add.u64 at, at, $2;""",
    "at", "$4",
))  # fmt: skip

# The two parts of it. $0 = address of the words of this thread's rank, or 0; $1 = address of the
# ranks' addresses; $2 = set of ranks.
_FIND_ASM = tl.constexpr(f"""{{
    {of_rank("$2", "$1", "8")}
    mov.u64 $0, 0;
    @mine ld.global.u64 $0, [at];
}}""")

# $1 = address of the words of this thread's rank, or 0; $2 = byte offset added to it; $3 = value.
_RAISE_FOUND_ASM = tl.constexpr(raised(
    """.reg .pred mine;
    .reg .b64 at;
    setp.ne.u64 mine, $1, 0;
    add.u64 at, $1, $2;""",
    "at", "$3",
))  # fmt: skip

# $0 = unused, $1 = the count, $2 = number to add, $3 = total, $4 = the word. The order is: stores
# of all threads, barrier, one thread's count at device scope (which covers the other programs'
# counts), the word at system scope. The count is 0 again when the word is visible, so that a graph
# can replay the launch.
_COUNT_ASM = tl.constexpr(f"""{{
    .reg .pred other;
    .reg .b32 thread, seen;
    mov.u32 $0, 0;
    setp.eq.u32 other, $2, 0;
    @other bra counted;
    bar.sync 0;
    mov.u32 thread, %tid.x;
    setp.ne.u32 other, thread, 0;
    @other bra counted;
    atom.add.acq_rel.gpu.global.u32 seen, [$1], $2;
    add.u32 seen, seen, $2;
    setp.ne.u32 other, seen, $3;
    @other bra counted;
    st.relaxed.gpu.global.u32 [$1], 0;
    {release("$4", "1")}
counted:
}}""")


@triton.jit
def now_ns(ON_GPU: tl.constexpr):
    """Return the time; 0 in the interpreter, which has no clock."""
    if ON_GPU:
        return tl.inline_asm_elementwise(_NOW_ASM, "=l", [], tl.int64, is_pure=False, pack=1)
    else:
        return tl.full((), 0, tl.int64)


@triton.jit
def _spin(word, value, never, stop):
    """In the interpreter, wait for a word: return 1 once it has the value, or 0."""
    stopped = tl.load(stop)
    seen = tl.load(word)
    while (seen != value) & (seen != never) & (stopped == 0):
        stopped = tl.load(stop)
        seen = tl.load(word)
    return (seen == value).to(tl.int32)


@triton.jit
def await_if(  # noqa: PLR0913 - a wait has as many facts
    asked,
    word,
    value,
    stop,
    patience_ns,
    status,
    number,
    FENCED: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Return 1 once the word has the value, 0 if the wait gives up; 1 at once if `asked` is false.

    If it gives up, the word `status` becomes the maximum of itself and `number`. While that word is
    not 0, waits read their words once.

    Args:
        asked: whether to wait, the same in all threads.
        word: pointer to int32.
        value: int32.
        stop: pointer to int32.
        patience_ns: int64, timeout.
        status: pointer to int32.
        number: int32, more than 0.
        FENCED: whether bulk (TMA) loads follow.
        ON_GPU: False in the interpreter, which has no inline assembly.
    """
    if ON_GPU:
        asm: tl.constexpr = _FENCED_ASM if FENCED else _AWAIT_IF_ASM
        came = tl.inline_asm_elementwise(
            asm, "=&r,l,l,r,l,r,l,r,~{memory}",
            [word, stop, value, patience_ns, asked.to(tl.int32), status, number],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        came = 1
        if asked:
            came = _spin(word, value, value, stop)
            if came == 0:
                tl.atomic_max(status, number, sem="relaxed", scope="sys")
    return came


@triton.jit
def await_words(  # noqa: PLR0913 - a kernel's arguments are its interface
    words,
    stride,
    ranks,
    value,
    gate,
    stop,
    patience_ns,
    GATED: tl.constexpr,
    WORLD: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Return 1 once the words of all these ranks have the value and the gate is 1, else 0.

    It also gives up when the gate is 2. A program must have three warps or more.

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
        ON_GPU: False in the interpreter.
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
        for rank in tl.static_range(WORLD):
            if ((ranks >> rank) & 1) != 0:
                came = came & _spin(words + rank * stride, value, value, stop)
        if GATED:
            came = came & _spin(gate, 1, 2, stop)
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
    WORLD: tl.constexpr,
    ON_GPU: tl.constexpr,
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
        came = _spin(gate, 1, 2, stop)
        for rank in tl.static_range(WORLD):
            if ((ranks >> rank) & 1) != 0:
                for chunk in tl.range(count):
                    at = words + rank * stride + chunk
                    came = came & _spin(at, value, value, stop)
    return came


@triton.jit
def find_words(addresses, ranks, ON_GPU: tl.constexpr):
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
    WORLD: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Set a word at each of these ranks like `raise_words`; `found` is from `find_words`."""
    if ON_GPU:
        tl.inline_asm_elementwise(
            _RAISE_FOUND_ASM, "=r,l,l,r,~{memory}", [found, place.to(tl.int64) * 4, value],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        for rank in tl.static_range(WORLD):
            if ((ranks >> rank) & 1) != 0:
                word = tl.load(addresses + rank).to(tl.pointer_type(tl.int32)) + place
                tl.atomic_xchg(word, value, sem="release", scope="sys")


@triton.jit
def raise_words(
    addresses,
    place,
    ranks,
    value,
    WORLD: tl.constexpr,
    ON_GPU: tl.constexpr,
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
        raise_found_words(0, addresses, place, ranks, value, WORLD, ON_GPU)


@triton.jit
def count_tiles(
    count,
    stored,
    tiles,
    word,
    ON_GPU: tl.constexpr,
):
    """Count tiles of a part that this program has stored; with the last one raise the word.

    Many programs store a part of a product, which a copy engine's stream waits for. Tiles must be
    stored by ordinary stores: bulk (TMA) stores are not ordered before the word.

    Args:
        count: pointer to int32, 0 before the first tile.
        stored: int32, number of stored tiles; 0: do nothing.
        tiles: int32, number of tiles of the part.
        word: pointer to int32.
        ON_GPU: False in the interpreter.
    """
    if ON_GPU:
        tl.inline_asm_elementwise(
            _COUNT_ASM, "=&r,l,r,r,l,~{memory}", [count, stored, tiles, word],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    elif stored > 0:
        seen = tl.atomic_add(count, stored, sem="acq_rel", scope="gpu")
        if seen + stored == tiles:
            tl.atomic_xchg(count, 0, sem="relaxed", scope="gpu")
            tl.atomic_xchg(word, 1, sem="release", scope="sys")


@triton.jit
def fence_bulk_loads(ON_GPU: tl.constexpr):
    """Order bulk (TMA) loads of this program behind its last wait."""
    if ON_GPU:
        tl.inline_asm_elementwise(
            _FENCE_ASM, "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )
