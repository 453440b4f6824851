"""Mailboxes in device code: data whose arrival is visible in the data itself.

A mailbox is a window that only these kernels use. An element that has not arrived holds a vacant
value, which no rank sends; the reader of an element stores the vacant value again. Calls alternate
between its two copies by a count on each rank's device, so replayed graphs alternate, too. A rank
may store in a peer's copy because its own previous call has ended. The peer had entered that call,
so it had ended the call before, which was the last to use the copy.

    words    one word per rank: the rank has entered, and which call
    counts   number of calls so far; programs of the current launch that have read that number;
             1 + the number of the first call that gave up, or 0: later calls store nothing,
             because peers may still be in that call

Stores are ordinary. They reach memory in pieces of at most 16 bytes, and never part of an element.
The `entered` words order nothing either: they matter only for the next launch.

The kernel issues loads early: it draws the count and reads the words before it waits for data, and
uses the results after that.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import num_threads

from ficco.kernels.one_kernel_handshake import tell
from ficco.kernels.signal_ptx import expired, met, of_first, of_rank
from ficco.kernels.signals import await_words, now_ns, raise_words
from ficco.plan import Signal, signal_place
from ficco.plan.tables import VACANT

__all__ = [
    "call_number",
    "count_call",
    "draw",
    "enter",
    "give_up",
    "is_open",
    "look",
    "meet_all",
    "sendable",
    "take",
]

_VACANT_16 = tl.constexpr((VACANT & 0xFFFF) - (1 << 16))
_VACANT_32 = tl.constexpr(VACANT - (1 << 32))
_MINUS_0 = tl.constexpr(-(1 << 31))
_ENTERED = tl.constexpr(signal_place(Signal(0, "entered", 0)))

# $0 = 1 if no thread misses data, 2 if some thread gives up, else 0; $1 = whether this thread
# misses data; $2 = the stop word; $3 = begin of the wait; $4 = timeout, both in ns. All threads
# continue together, because one thread must not store vacant values that another still waits for.
_ALL_CAME_ASM = tl.constexpr(f"""{{
    .reg .pred missing, gave_up;
    .reg .b32 stopped;
    .reg .b64 now;
    setp.ne.u32 missing, $1, 0;
    {met("missing")}
    mov.u32 $0, 1;
    @!missing bra together;
    {expired(("$2",), "$3", "$4")}
    {met("gave_up")}
    selp.u32 $0, 2, 0, gave_up;
together:
}}""")

# $0 = number of earlier draws, in the first thread; $1 = the count; $2 = the call's number. The
# barrier uses the number, so that all threads have read it.
_DRAW_ASM = tl.constexpr(f"""{{
    .reg .pred started;
    setp.eq.u32 started, $2, 0;
    {met("started")}
    selp.u32 $0, 0, 1, started;
    {of_first()}
    @mine atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
}}""")

# $0 = value of a rank's word, in the thread of that rank; in other threads $3, the expected value.
# $1 = address of the words; $2 = set of ranks.
_LOOK_ASM = tl.constexpr(f"""{{
    {of_rank("$2", "$1", "4")}
    mov.u32 $0, $3;
    @mine ld.relaxed.sys.global.u32 $0, [at];
}}""")

# $0 = 1 if all threads saw the expected value, else 0; $1 = this thread's value; $2 = expected.
_SAW_ALL_ASM = tl.constexpr(f"""{{
    .reg .pred other;
    setp.ne.u32 other, $1, $2;
    {met("other")}
    selp.u32 $0, 0, 1, other;
}}""")


@triton.jit
def _stamp(digest, number):
    """Return the value of a rank's word in a call: never 0, and different in calls close by."""
    return (digest | 1) + 2 * number


@triton.jit
def enter(
    places,
    rank,
    peers,
    digest,
    number,
    WORLD: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Notify every peer that this rank has entered its call of this number.

    places: addresses of each rank's words of this call's copy.
    """
    raise_words(places, rank, peers, _stamp(digest, number), WORLD, ON_GPU)


@triton.jit
def look(words, peers, digest, number, ON_GPU: tl.constexpr):
    """Return the current value of a peer's word in each thread, for `meet_all`."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            _LOOK_ASM, "=&r,l,l,r,~{memory}", [words, peers, _stamp(digest, number)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.full((), 0, tl.int32)


@triton.jit
def meet_all(  # noqa: PLR0913 - a kernel's arguments are its interface
    seen,
    words,
    counts,
    stop,
    status,
    peers,
    digest,
    number,
    patience_ns,
    WORLD: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Wait until every peer has entered the same call; return 1, or give up and return 2.

    seen: the result of `look`; if all peers had entered by then, there is no wait.
    """
    stamp = _stamp(digest, number)
    if ON_GPU:
        met = tl.inline_asm_elementwise(
            _SAW_ALL_ASM, "=r,r,r,~{memory}", [seen, stamp], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        met = tl.full((), 0, tl.int32)
    if met == 0:
        met = await_words(words, 1, peers, stamp, words, stop, patience_ns, False, WORLD, ON_GPU)
        if met == 0:
            everyone = tl.arange(0, 64)
            of_peers = ((peers >> everyone) & 1) != 0
            seen_now = tl.load(words + everyone, mask=of_peers, other=0, volatile=True)
            late = tl.min(tl.where(of_peers & (seen_now != stamp), everyone, 64))
            if late == 64:  # all have just entered; the status needs some peer
                late = tl.min(tl.where(of_peers, everyone, 64))
            # Not _ENTERED + late, which becomes a constexpr in Triton 3.8's interpreter.
            give_up(counts, number, status, late + _ENTERED + 1)
    return 2 - met


@triton.jit
def draw(counts, number, ON_GPU: tl.constexpr):
    """Record that a program has read the call's number; return how many had before."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            _DRAW_ASM, "=&r,l,r,~{memory}", [counts + 1, number],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.atomic_add(counts + 1, 1)


@triton.jit
def count_call(counts, number, programs, drawn):
    """Count the call, if this program was the last to draw.

    No program reads the number from memory after its own draw, so none reads the next number.
    """
    last = drawn == programs - 1
    tl.store(counts + 1, 0, mask=last)
    tl.store(counts, number + 1, mask=last)


@triton.jit
def call_number(counts):
    """Return this call's number, read past caches, as the previous call may not have ended."""
    return tl.load(counts, volatile=True)


@triton.jit
def is_open(counts, number):
    """Return whether no earlier call has given up; the same in all threads of a launch."""
    first = tl.load(counts + 2, volatile=True)
    return (first == 0) | (first > number)


@triton.jit
def give_up(counts, number, status, told):
    """Stop later calls from storing, and report the word that did not arrive."""
    if tl.load(counts + 2, volatile=True) == 0:
        tl.store(counts + 2, number + 1)
    tell(status, told)


@triton.jit
def sendable(values):
    """Return the bits of values, none of them vacant. -0 is sent as 0, which sums produce."""
    if values.dtype.primitive_bitwidth == 32:
        bits = values.to(tl.int32, bitcast=True)
        return tl.where((bits == _VACANT_32) | (bits == _MINUS_0), 0, bits)
    else:
        bits = values.to(tl.int16, bitcast=True)
        return tl.where(bits == _VACANT_16, 0, bits).to(tl.int16)


@triton.jit
def _all_came(missing, stop, begin_ns, patience_ns, ON_GPU: tl.constexpr):
    """Return 1 if no thread misses data, 2 if some thread gives up, else 0; same in all threads."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            _ALL_CAME_ASM, "=&r,r,l,l,l,~{memory}", [missing, stop, begin_ns, patience_ns],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.where(missing == 0, 1, tl.where(tl.load(stop) != 0, 2, 0)).to(tl.int32)


@triton.jit
def take(  # noqa: PLR0913
    at,
    distance,
    inside,
    stop,
    patience_ns,
    own,
    mine,
    COUNT: tl.constexpr,
    HAS_OWN: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Wait for blocks of a mailbox, make them vacant, and return their float32 sum, and -1.

    It gives up like `await_words`, and then returns the number of a missing block with the sum.

    A block has at least as many elements as the program has threads. Threads that share an element
    could see its arrival at different times, but `tl.max` uses the value of one of them.

    Args:
        at: pointers to a block's elements, [rows, cols].
        distance: elements from one of the COUNT blocks to the next.
        inside: which elements to wait for.
        stop: pointer to int32.
        patience_ns: int64, timeout.
        own: if HAS_OWN, the number of a block that is not in the mailbox.
        mine: the values of that block, float32 [rows, cols].
        COUNT: number of blocks, which are summed in order.
        HAS_OWN: whether one block is not in the mailbox.
        ON_GPU: False in the interpreter.
    """
    if ON_GPU:
        enough: tl.constexpr = at.shape[0] * at.shape[1] >= num_threads()
        tl.static_assert(enough, "threads share elements that are awaited")
    kind: tl.constexpr = at.dtype.element_ty
    if kind.primitive_bitwidth == 32:
        boxes = at.to(tl.pointer_type(tl.int32))
        vacant = tl.full((), _VACANT_32, tl.int32)
    else:
        boxes = at.to(tl.pointer_type(tl.int16))
        vacant = tl.full((), _VACANT_16, tl.int16)
    begin = now_ns(ON_GPU)
    # The loop carries only values that are used after it: Triton's compiler fails otherwise.
    state = tl.full((), 0, tl.int32)
    missing = tl.full((), 0, tl.int32)  # 1 + the number of a block that has not arrived
    total = tl.zeros(at.shape, tl.float32)
    while state == 0:
        total = tl.zeros(at.shape, tl.float32)
        empty = tl.zeros(at.shape, tl.int32)
        for source in tl.static_range(COUNT):
            sent = inside
            if HAS_OWN:
                sent = inside & (source != own)
            bits = tl.load(boxes + source * distance, mask=sent, other=0, volatile=True)
            empty = tl.maximum(empty, tl.where(bits == vacant, source + 1, 0))
            block = bits.to(kind, bitcast=True).to(tl.float32)
            if HAS_OWN:
                block = tl.where(source == own, mine, block)
            total += block
        missing = tl.max(tl.max(empty, 1), 0)
        state = _all_came(missing, stop, begin, patience_ns, ON_GPU)
    late = tl.where(state == 2, tl.maximum(missing, 1) - 1, -1)
    for source in tl.static_range(COUNT):
        sent = inside & (late < 0)
        if HAS_OWN:
            sent = sent & (source != own)
        tl.store(boxes + source * distance, vacant, mask=sent)
    return total, late
