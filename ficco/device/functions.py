"""Triton functions that reach other ranks' windows, raise signals and wait for them.

A kernel calls them with `window`, the pointer to the table of a `ficco.device.Window`. A symmetric
pointer is a pointer into this rank's data or signals; the same offset is valid at every rank.

All threads of a program call a function together. The functions order ordinary loads and stores;
they do not order bulk (TMA) copies. A loop that waits must not be pipelined, flattened or
warp-specialized, because loads would move ahead of the wait.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait, num_threads

from ficco.device import layout
from ficco.private.triton_interpreter import let_loops_count

__all__ = [
    "after_previous_launch", "barrier", "begin_call", "end_call", "fail", "fence", "get", "load",
    "my_pe", "n_pes", "now_ns", "on_gpu", "put", "put_signal", "remote_ptr", "signal", "status_of",
    "store", "timeout_of", "wait",
]  # fmt: skip

_RANK, _WORLD = tl.constexpr(layout.RANK), tl.constexpr(layout.WORLD)
_TIMEOUT_NS, _STATE = tl.constexpr(layout.TIMEOUT_NS), tl.constexpr(layout.STATE)
_DATA, _SIGNALS = tl.constexpr(layout.DATA), tl.constexpr(layout.SIGNALS)
_OWN_DATA, _OWN_SIGNALS = tl.constexpr(layout.OWN_DATA), tl.constexpr(layout.OWN_SIGNALS)
_STATUS, _CALLS = tl.constexpr(layout.STATUS), tl.constexpr(layout.CALLS)
_DRAWN = tl.constexpr(layout.DRAWN)
_ALIGN = tl.constexpr(layout.ALIGN)

# $1 = the word, $2 = the value.
_SIGNAL = """{
    .reg .pred first;
    .reg .b32 thread;
    barrier.sync 0;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first STORE [$1], $2;
    mov.u32 $0, 0;
}"""
_SET_ASM = tl.constexpr(_SIGNAL.replace("STORE", "st.release.sys.global.u32"))
_ADD_ASM = tl.constexpr(_SIGNAL.replace("STORE", "red.release.sys.global.add.u32"))

# $0 = 1 if the word came; $1 = the word, $2 = the status, $3 = the value, $4 = timeout in ns, $5 =
# what the status becomes. One thread spins. The barrier gives its result to all threads.
_WAIT = """{
    .reg .pred other, came, gave_up;
    .reg .b32 thread, seen, told;
    .reg .b64 begin, now;
    setp.ne.u32 gave_up, 0, 0;
    mov.u32 thread, %tid.x;
    setp.ne.u32 other, thread, 0;
    @other bra together;
    mov.u64 begin, %globaltimer;
again:
    ld.relaxed.sys.global.u32 told, [$2];
    ld.acquire.sys.global.u32 seen, [$1];
    setp.COMPARE.s32 came, seen, $3;
    @came bra together;
    mov.u64 now, %globaltimer;
    sub.u64 now, now, begin;
    setp.gt.u64 gave_up, now, $4;
    setp.ne.or.u32 gave_up, told, 0, gave_up;
    @!gave_up bra again;
    atom.relaxed.sys.global.cas.b32 told, [$2], 0, $5;
together:
    barrier.red.or.pred gave_up, 0, gave_up;
    selp.u32 $0, 0, 1, gave_up;
}"""
_EQ_ASM, _NE_ASM, _GT_ASM, _GE_ASM, _LT_ASM, _LE_ASM = (
    tl.constexpr(_WAIT.replace("COMPARE", cmp)) for cmp in ("eq", "ne", "gt", "ge", "lt", "le")
)

# $0 = 1 if all peers came; $1 = address of the ranks' signals, $2 = bytes to the barrier's words,
# $3 = rank, $4 = world, $5 = the status, $6 = timeout in ns, $7 = what the status becomes for rank
# 0. Each peer has a thread. A word counts the barriers that its rank has entered; the own word is
# written here only. All threads have read it when they meet the first time.
_BARRIER = """{
    .reg .pred other, own, late, gave_up;
    .reg .b32 thread, count, seen, told;
    .reg .b64 at, words, step, begin, now;
    setp.ne.u32 gave_up, 0, 0;
    mov.u32 thread, %tid.x;
    mul.wide.u32 at, $3, 8;
    add.u64 at, at, $1;
    ld.global.u64 words, [at];
    add.u64 words, words, $2;
    mul.wide.u32 step, $3, 4;
    add.u64 at, words, step;
    ld.relaxed.gpu.global.u32 count, [at];
    add.u32 count, count, 1;
    barrier.sync 0;
    setp.eq.u32 own, thread, $3;
    @own st.relaxed.gpu.global.u32 [at], count;
    setp.ge.or.u32 other, thread, $4, own;
    @other bra together;
    mul.wide.u32 at, thread, 8;
    add.u64 at, at, $1;
    ld.global.u64 at, [at];
    add.u64 at, at, $2;
    add.u64 at, at, step;
    st.release.sys.global.u32 [at], count;
    mul.wide.u32 at, thread, 4;
    add.u64 at, at, words;
    mov.u64 begin, %globaltimer;
again:
    ld.relaxed.sys.global.u32 told, [$5];
    ld.acquire.sys.global.u32 seen, [at];
    sub.u32 seen, seen, count;
    setp.lt.s32 late, seen, 0;
    @!late bra together;
    mov.u64 now, %globaltimer;
    sub.u64 now, now, begin;
    setp.gt.u64 gave_up, now, $6;
    setp.ne.or.u32 gave_up, told, 0, gave_up;
    @!gave_up bra again;
    add.u32 seen, thread, $7;
    atom.relaxed.sys.global.cas.b32 told, [$5], 0, seen;
together:
    barrier.red.or.pred gave_up, 0, gave_up;
    selp.u32 $0, 0, 1, gave_up;
}"""
_BARRIER_ASM = tl.constexpr(_BARRIER)

_FENCE_ASM = tl.constexpr("""{
    barrier.sync 0;
    fence.acq_rel.sys;
    mov.u32 $0, 0;
}""")

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
_NOW_ASM = tl.constexpr("mov.u64 $0, %globaltimer;")


@triton.jit
def _probe():
    """Do nothing; its type says whether Triton interprets or compiles."""


on_gpu = tl.constexpr(isinstance(_probe, triton.JITFunction))

if on_gpu:

    @triton.jit
    def now_ns():
        """Return a time in ns."""
        return tl.inline_asm_elementwise(_NOW_ASM, "=l", [], tl.int64, is_pure=False, pack=1)

else:
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

    It is 0 until a wait gives up. Then all other waits give up, too: they read their word once.
    """
    return tl.load(window + _STATE).to(tl.pointer_type(tl.int32)) + _STATUS


@triton.jit
def fail(number, window):
    """Set the window's status to a number other than 0, unless a wait has given up before."""
    tl.atomic_cas(status_of(window), 0, number, sem="relaxed", scope="sys")


@triton.jit
def remote_ptr(pointer, pe, window):
    """Return the pointer to the same element of rank `pe`'s data.

    It reads two entries of the table, and orders nothing. Translate a scalar pointer once, and add
    offsets after that.

    Args:
        pointer: symmetric pointer into the data, a scalar or a block.
        pe: int32, the rank.
        window: the table.
    """
    return _moved(pointer, tl.load(window + _DATA + pe) - tl.load(window + _OWN_DATA))


@triton.jit
def _moved(pointer, distance):
    """Return a pointer moved by a number of bytes, which `_ALIGN` divides."""
    size: tl.constexpr = pointer.dtype.scalar.element_ty.primitive_bitwidth // 8
    return pointer + tl.multiple_of(distance // size, _ALIGN // size)


@triton.jit
def _remote_signal(word, pe, window):
    """Return the pointer to the same signal of rank `pe`."""
    return _moved(word, tl.load(window + _SIGNALS + pe) - tl.load(window + _OWN_SIGNALS))


@triton.jit
def load(pointer, pe, window, mask=None, other=None):
    """Return elements of rank `pe`'s data. Order: as an ordinary load.

    Args:
        pointer: symmetric pointer or pointers.
        pe: int32, the rank.
        window: the table.
        mask: which elements to load.
        other: what the others are.
    """
    return tl.load(remote_ptr(pointer, pe, window), mask=mask, other=other)


@triton.jit
def store(pointer, value, pe, window, mask=None):
    """Store values in rank `pe`'s data. Order: as an ordinary store.

    The stores become visible to rank `pe` in any order. `signal` or `fence` orders them.

    Args:
        pointer: symmetric pointer or pointers.
        value: the values.
        pe: int32, the rank.
        window: the table.
        mask: as in `tl.store`.
    """
    tl.store(remote_ptr(pointer, pe, window), value, mask=mask)


@triton.jit
def put(
    dest,
    source,
    nelems,
    pe,
    window,
    BLOCK: tl.constexpr = 1024,  # noqa: N803 - Triton's way to mark constants
):
    """Copy contiguous elements from this rank's memory to rank `pe`'s data.

    Order: as ordinary loads and stores. When it returns, the elements may not have arrived, and
    other threads of the program may still read `source`.

    Args:
        dest: symmetric pointer to the first element.
        source: pointer to the first element, in any memory of this rank.
        nelems: int32 or int64, number of elements.
        pe: int32, the rank.
        window: the table.
        BLOCK: elements that the program copies in a step, a power of two.
    """
    tl.static_assert(dest.dtype == source.dtype, "dest and source need one dtype")
    remote = remote_ptr(dest, pe, window)
    for begin in tl.range(0, nelems, BLOCK, num_stages=1):
        at = begin + tl.arange(0, BLOCK)
        tl.store(remote + at, tl.load(source + at, mask=at < nelems), mask=at < nelems)


@triton.jit
def get(
    dest,
    source,
    nelems,
    pe,
    window,
    BLOCK: tl.constexpr = 1024,  # noqa: N803
):
    """Copy contiguous elements from rank `pe`'s data to this rank's memory.

    Order: as ordinary loads and stores. Other threads of the program may read `dest` after
    `tl.debug_barrier()`.

    Args:
        dest: pointer to the first element, in any memory of this rank.
        source: symmetric pointer to the first element.
        nelems: int32 or int64, number of elements.
        pe: int32, the rank.
        window: the table.
        BLOCK: elements that the program copies in a step, a power of two.
    """
    tl.static_assert(dest.dtype == source.dtype, "dest and source need one dtype")
    remote = remote_ptr(source, pe, window)
    for begin in tl.range(0, nelems, BLOCK, num_stages=1):
        at = begin + tl.arange(0, BLOCK)
        tl.store(dest + at, tl.load(remote + at, mask=at < nelems), mask=at < nelems)


@triton.jit
def fence():
    """Order the program's earlier stores before its later ones, for all ranks.

    Another rank that sees a later store, and then orders its reads, sees the earlier ones. The
    fence covers stores of all threads of this program, to any rank, and none of other programs.
    """
    if on_gpu:
        tl.inline_asm_elementwise(
            _FENCE_ASM, "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def signal(word, value, op: tl.constexpr, pe, window):
    """Set or add to a signal at rank `pe`: a release at system scope.

    Who sees the new value by `wait` also sees all stores that any thread of this program made
    before, to any rank, and all that this program has seen by `wait` itself. Stores of other
    programs are not covered, unless this program has synchronized with them.

    Args:
        word: symmetric pointer to the signal, int32.
        value: int32.
        op: "set" or "add".
        pe: int32, the rank.
        window: the table.
    """
    remote = _remote_signal(word, pe, window)
    asm: tl.constexpr = _SET_ASM if op == "set" else _ADD_ASM if op == "add" else None
    tl.static_assert(asm is not None, "op is 'set' or 'add'")
    if on_gpu:
        tl.inline_asm_elementwise(
            asm, "=r,l,r,~{memory}", [remote, tl.cast(value, tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    elif op == "set":
        tl.atomic_xchg(remote, value, sem="release", scope="sys")
    else:
        tl.atomic_add(remote, value, sem="release", scope="sys")


@triton.jit
def put_signal(  # noqa: PLR0913 - the arguments of `put` and of `signal`
    dest,
    source,
    nelems,
    word,
    value,
    op: tl.constexpr,
    pe,
    window,
    BLOCK: tl.constexpr = 1024,  # noqa: N803
):
    """Copy elements to rank `pe`, as `put`, then raise a signal there, as `signal`.

    Who sees the signal by `wait` sees the elements.

    Args:
        dest: symmetric pointer to the first element.
        source: pointer to the first element, in any memory of this rank.
        nelems: int32 or int64, number of elements.
        word: symmetric pointer to the signal, int32.
        value: int32.
        op: "set" or "add".
        pe: int32, the rank.
        window: the table.
        BLOCK: as in `put`.
    """
    put(dest, source, nelems, pe, window, BLOCK)
    signal(word, value, op, pe, window)


@triton.jit
def _holds(seen, cmp: tl.constexpr, value):
    """Return whether a comparison holds."""
    if cmp == "eq":
        held = seen == value
    elif cmp == "ne":
        held = seen != value
    elif cmp == "gt":
        held = seen > value
    elif cmp == "ge":
        held = seen >= value
    elif cmp == "lt":
        held = seen < value
    else:
        held = seen <= value
    return held


@triton.jit
def wait(word, cmp: tl.constexpr, value, window):
    """Wait for one of this rank's signals: an acquire at system scope.

    All threads of the program may read after it, by ordinary loads, what the raising program wrote
    before its `signal`. Bulk (TMA) loads and reads of other programs are not covered.

    Args:
        word: pointer to the signal, int32, in this rank's memory.
        cmp: "eq", "ne", "gt", "ge", "lt" or "le": how the signal must compare with the value.
        value: int32.
        window: the table.

    Returns:
        int32, the same in all threads: 1, or 0 if the wait gave up. It gives up after the window's
        timeout, or when the status is not 0, and reads the signal at least once. It then sets the
        status to 1 + the number of the signal.
    """
    status, limit_ns = status_of(window), timeout_of(window)
    number = ((word.to(tl.int64) - tl.load(window + _OWN_SIGNALS)) // 4 + 1).to(tl.int32)
    asm: tl.constexpr = (
        _EQ_ASM if cmp == "eq" else _NE_ASM if cmp == "ne" else _GT_ASM if cmp == "gt"
        else _GE_ASM if cmp == "ge" else _LT_ASM if cmp == "lt" else _LE_ASM if cmp == "le"
        else None
    )  # fmt: skip
    tl.static_assert(asm is not None, "cmp is 'eq', 'ne', 'gt', 'ge', 'lt' or 'le'")
    if on_gpu:
        came = tl.inline_asm_elementwise(
            asm, "=r,l,l,r,l,r,~{memory}",
            [word, status, tl.cast(value, tl.int32), limit_ns, number],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        begin = now_ns()
        came = _holds(tl.load(word, volatile=True), cmp, value).to(tl.int32)
        told = tl.load(status, volatile=True)
        while (came == 0) & (told == 0) & (now_ns() - begin < limit_ns):
            told = tl.load(status, volatile=True)
            came = _holds(tl.load(word, volatile=True), cmp, value).to(tl.int32)
        if came == 0:
            fail(number, window)
    return came


@triton.jit
def barrier(place, window, WORLD: tl.constexpr):  # noqa: N803
    """Wait until the programs that use this place have entered the barrier on all ranks.

    It releases and acquires at system scope: all threads of the program see what these programs of
    all ranks wrote before they entered. Programs of one rank are not synchronized: give each
    program that takes part a place of its own.

    Args:
        place: int32, number of the first of WORLD signals, which no other function uses.
        window: the table.
        WORLD: number of ranks; the program has as many threads or more.

    Returns:
        int32: 1, or 0 if the barrier gave up, as `wait`.
    """
    rank, limit_ns, status = my_pe(window), timeout_of(window), status_of(window)
    place = tl.cast(place, tl.int32)
    bases = window + _SIGNALS
    if on_gpu:
        enough: tl.constexpr = num_threads() >= WORLD
        tl.static_assert(enough, "a barrier needs a thread per rank")
        world = tl.full((), WORLD, tl.int32)
        came = tl.inline_asm_elementwise(
            _BARRIER_ASM, "=r,l,l,r,r,l,l,r,~{memory}",
            [bases.to(tl.int64), place.to(tl.int64) * 4, rank, world, status,
             limit_ns, place + 1],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        words = tl.load(bases + rank).to(tl.pointer_type(tl.int32)) + place
        count = tl.load(words + rank) + 1
        tl.store(words + rank, count)
        for turn in tl.static_range(1, WORLD):
            peer = (rank + turn) % WORLD
            remote = tl.load(bases + peer).to(tl.pointer_type(tl.int32)) + place
            tl.atomic_xchg(remote + rank, count, sem="release", scope="sys")
        begin = now_ns()
        came = tl.full((), 1, tl.int32)
        for turn in tl.static_range(1, WORLD):
            peer = (rank + turn) % WORLD
            seen = tl.load(words + peer, volatile=True)
            told = tl.load(status, volatile=True)
            while (seen - count < 0) & (told == 0) & (now_ns() - begin < limit_ns):
                told = tl.load(status, volatile=True)
                seen = tl.load(words + peer, volatile=True)
            if seen - count < 0:
                came = tl.full((), 0, tl.int32)
                fail(place + 1 + peer, window)
    return came


@triton.jit
def begin_call(window):
    """Return the number of this call of the window, int32, the same in all programs of the launch.

    Calls count from 0, also when a CUDA graph is replayed. All programs of a launch call it once,
    and `end_call` later; launches on one window do not overlap. A negative number means that an
    earlier call has given up: peers may still be in that call, so store nothing.
    """
    state = tl.load(window + _STATE).to(tl.pointer_type(tl.int32))
    number = tl.load(state + _CALLS, volatile=True)
    return tl.where(tl.load(state + _STATUS, volatile=True) == 0, number, -1)


@triton.jit
def end_call(call, window):
    """Count this program; the last program of the launch counts the call. It orders nothing.

    Call it once, after `begin_call`, and ahead of the waits: its latency is then hidden.

    Args:
        call: the result of `begin_call`.
        window: the table.
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


@triton.jit
def after_previous_launch():
    """Wait until the previous kernel of the stream has ended, in a launch with `launch_pdl=True`.

    Call it first, before anything is read or written. In other launches it does nothing.
    """
    if on_gpu:
        gdc_wait()
