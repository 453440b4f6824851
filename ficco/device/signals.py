"""Triton functions that order memory between ranks: signals, waits, barriers and fences.

All threads of a program call a function together. The functions order ordinary loads and stores;
they do not order bulk (TMA) copies. A loop that waits must not be pipelined, flattened or
warp-specialized, because loads would move ahead of the wait.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import num_threads

from ficco.device import layout
from ficco.device.bounds import checked
from ficco.device.memory import moved, put
from ficco.device.state import fail, my_pe, now_ns, on_gpu, status_of, timeout_of
from ficco.kernels.signal_ptx import of_first, raised, release
from ficco.kernels.signal_ptx import wait as waiting

_SIGNALS = tl.constexpr(layout.SIGNALS)
_OWN_SIGNALS = tl.constexpr(layout.OWN_SIGNALS)

# $1 = the word, $2 = the value.
_SET_ASM, _ADD_ASM = (tl.constexpr(raised(of_first(), "$1", "$2", op)) for op in ("set", "add"))

# $0 = 1 if the word came; $1 = the word, $2 = the status, $3 = the value, $4 = timeout in ns, $5 =
# what the status becomes. One thread spins.
_EQ_ASM, _NE_ASM, _GT_ASM, _GE_ASM, _LT_ASM, _LE_ASM = (
    tl.constexpr(waiting(
        of_first(), "$1", f"setp.{cmp}.s32 came, seen, $3;", ("$2",), "$4",
        missed="atom.relaxed.sys.global.cas.b32 told, [$2], 0, $5;",
    ))
    for cmp in ("eq", "ne", "gt", "ge", "lt", "le")
)  # fmt: skip

# $0 = 1 if all peers came; $1 = address of the ranks' signals, $2 = bytes to the barrier's words,
# $3 = rank, $4 = world, $5 = the status, $6 = timeout in ns, $7 = what the status becomes for rank
# 0. Each peer has a thread. A word counts the barriers that its rank has entered; the own word is
# written here only. All threads have read it when they meet the first time.
_BARRIER_ASM = tl.constexpr(waiting(
    f""".reg .pred mine, own;
    .reg .b32 thread, count;
    .reg .b64 at, words, step;
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
    setp.lt.and.u32 mine, thread, $4, !own;
    mul.wide.u32 at, thread, 8;
    add.u64 at, at, $1;
    @mine ld.global.u64 at, [at];
    add.u64 at, at, $2;
    add.u64 at, at, step;
    @mine {release("at", "count")}
    mul.wide.u32 at, thread, 4;
    add.u64 at, at, words;""",
    "at", "sub.u32 seen, seen, count;\n    setp.ge.s32 came, seen, 0;", ("$5",), "$6",
    missed="""add.u32 seen, thread, $7;
    atom.relaxed.sys.global.cas.b32 told, [$5], 0, seen;""",
))  # fmt: skip

_FENCE_ASM = tl.constexpr("""{
    barrier.sync 0;
    fence.acq_rel.sys;
    mov.u32 $0, 0;
}""")


@triton.jit
def _remote_signal(word, pe, window):
    """Return the pointer to the same signal of rank `pe`."""
    return moved(word, tl.load(window + _SIGNALS + pe) - tl.load(window + _OWN_SIGNALS))


@triton.jit
def fence():
    """Order the program's earlier stores before its later ones, for all ranks.

    Another rank that sees a later store, and then orders its reads, sees the earlier stores. The
    fence covers stores of all threads of this program, to any rank, but not of other programs.
    """
    if on_gpu:
        tl.inline_asm_elementwise(
            _FENCE_ASM, "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )


@checked(word="word")
@triton.jit
def signal(word, value, op: tl.constexpr, pe, window):
    """Set or add to a signal at rank `pe`: a release at system scope.

    A program that sees the new value by `wait` also sees all earlier stores of any thread of this
    program, to any rank, and everything that this program has seen by `wait`. Stores of other
    programs are not covered, unless this program has synchronized with them.

    Args:
        word: symmetric pointer to the signal, int32.
        value: int32.
        op: "set" or "add".
        pe: int32, the rank.
        window: the table.

    Example:
        ``fd.signal(signals + 3, 1, "add", peer, window)``
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


@checked(data="dest", count="nelems", word="word")
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
    BLOCK: tl.constexpr = 1024,
):
    """Copy elements to rank `pe`, as `put`, then set a signal there, as `signal`.

    A program that sees the signal by `wait` sees the elements.

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

    Example:
        ``fd.put_signal(data, source, count, signals, 1, "set", peer, window)``
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


@checked(word="word")
@triton.jit
def wait(word, cmp: tl.constexpr, value, window):
    """Wait for one of this rank's signals: an acquire at system scope.

    After it, ordinary loads of all threads of the program see the stores of the other program
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

    Example:
        ``came = fd.wait(signals, "eq", 1, window)``
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


@checked()
@triton.jit
def barrier(place, window, WORLD: tl.constexpr):
    """Wait until the programs that use this place have entered the barrier on all ranks.

    It releases and acquires at system scope: all threads of the program see the stores of these
    programs, on all ranks, before they entered. Programs of one rank are not synchronized: give
    each program that takes part its own place.

    Args:
        place: int32, number of the first of WORLD signals. No other function may use these signals.
        window: the table.
        WORLD: number of ranks; the program has as many threads or more.

    Returns:
        int32: 1, or 0 if the barrier gave up, as `wait`.

    Example:
        ``met = fd.barrier(tl.program_id(0) * WORLD, window, WORLD)``
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
