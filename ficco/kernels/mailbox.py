"""Mailboxes inside of a kernel: data that tell by themselves that they have come. Device code only.

A mailbox is a window that only such kernels use. Wherever nothing has come it holds a vacant value,
which nobody sends; whoever has read data puts it back. Calls take its two copies in turn, by a
count that each rank keeps on its device, so that graphs that are replayed take them in turn, too.
Why a rank may store in a peer's copy: it has ended its call before, in which that peer had entered;
so the peer had ended the call before that one, which was the last to use the copy.

    words    a word for every rank, which says that it has entered, and which call
    counts   calls so far; programs of the launch under way that have read that number; 1 + the
             number of the first call that gave up, or 0: later ones store nothing, for peers may
             still be in that one

Stores are ordinary ones; they reach memory in pieces of 16 bytes or less, and no element in parts.
That a peer has entered orders nothing either: what it says is of use to the next launch.

Nothing is waited for where it is asked for: the count is drawn, and words are looked at, before
data are awaited, and what they say is used behind that.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import num_threads

from ficco.kernels.one_kernel_all_reduce_table import VACANT
from ficco.kernels.one_kernel_handshake import tell
from ficco.kernels.signal_sets import await_words, raise_words
from ficco.plan import Signal, signal_place

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
_NOW_ASM = tl.constexpr("mov.u64 $0, %globaltimer;")

# $0 = 1 if no thread misses anything, 2 if some thread gives up, else 0; $1 = whether this thread
# misses something; $2 = the word that says stop; $3 = when it began; $4 = patience, both in ns.
# All threads go on together: each has looked for itself, and whatever one puts back, once it has
# all, another one may still be looking for.
_ALL_CAME = """{
    .reg .pred missing, gave_up;
    .reg .b32 stopped;
    .reg .b64 now;
    setp.ne.u32 missing, $1, 0;
    barrier.red.or.pred missing, 0, missing;
    mov.u32 $0, 1;
    @!missing bra together;
    ld.relaxed.sys.global.u32 stopped, [$2];
    mov.u64 now, %globaltimer;
    sub.u64 now, now, $3;
    setp.gt.u64 gave_up, now, $4;
    setp.ne.or.u32 gave_up, stopped, 0, gave_up;
    barrier.red.or.pred gave_up, 0, gave_up;
    selp.u32 $0, 2, 0, gave_up;
together:
}"""
_ALL_CAME_ASM = tl.constexpr(_ALL_CAME)

# $0 = programs that drew before, in the first thread; $1 = the count; $2 = the call's number. The
# barrier is given a use of that, so that all threads have read it.
_DRAW = """{
    .reg .pred first;
    .reg .b32 thread;
    setp.eq.u32 first, $2, 0;
    barrier.red.or.pred first, 0, first;
    selp.u32 $0, 0, 1, first;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
}"""
_DRAW_ASM = tl.constexpr(_DRAW)

# $0 = what a thread sees of a rank's word, in the thread of that rank; in others $3, what it is to
# be. $1 = address of the words; $2 = set of ranks.
_LOOK = """{
    .reg .pred mine;
    .reg .b32 thread;
    .reg .b64 at, set;
    mov.u32 thread, %tid.x;
    shr.u64 set, $2, thread;
    and.b64 set, set, 1;
    setp.ne.u64 mine, set, 0;
    setp.lt.and.u32 mine, thread, 64, mine;
    mul.wide.u32 at, thread, 4;
    add.u64 at, at, $1;
    mov.u32 $0, $3;
    @mine ld.relaxed.sys.global.u32 $0, [at];
}"""
_LOOK_ASM = tl.constexpr(_LOOK)

# $0 = 1 if all threads saw what was to be, else 0; $1 = what this thread saw; $2 = what is to be.
_SAW_ALL = """{
    .reg .pred other;
    setp.ne.u32 other, $1, $2;
    barrier.red.or.pred other, 0, other;
    selp.u32 $0, 0, 1, other;
}"""
_SAW_ALL_ASM = tl.constexpr(_SAW_ALL)


@triton.jit
def _stamp(digest, number):
    """Return what a rank's word becomes in a call, and in no near call: never 0."""
    return (digest | 1) + 2 * number


@triton.jit
def enter(
    places,
    rank,
    peers,
    digest,
    number,
    WORLD: tl.constexpr,  # noqa: N803 - Triton's way to mark constants
    ON_GPU: tl.constexpr,  # noqa: N803
):
    """Tell every peer that this rank has entered its call of this number.

    places: where each rank's words of this call's copy begin.
    """
    raise_words(places, rank, peers, _stamp(digest, number), WORLD, ON_GPU)


@triton.jit
def look(words, peers, digest, number, ON_GPU: tl.constexpr):  # noqa: N803
    """Return what each thread sees of a peer's word by now, for `meet_all`."""
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
    WORLD: tl.constexpr,  # noqa: N803
    ON_GPU: tl.constexpr,  # noqa: N803
):
    """Await that every peer has entered the same call; return 1, or give up and return 2.

    seen: of `look`; if that was all, nothing is awaited.
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
            if late == 64:  # all have come just now; some peer has to be named
                late = tl.min(tl.where(of_peers, everyone, 64))
            # Not _ENTERED + late: Triton 3.8's interpreter makes a constexpr of that.
            give_up(counts, number, status, late + _ENTERED + 1)
    return 2 - met


@triton.jit
def draw(counts, number, ON_GPU: tl.constexpr):  # noqa: N803
    """Say that a program knows the call's number; return how many did before, for `count_call`."""
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

    No program reads the number from memory behind its own draw, so none reads the next one.
    """
    last = drawn == programs - 1
    tl.store(counts + 1, 0, mask=last)
    tl.store(counts, number + 1, mask=last)


@triton.jit
def call_number(counts):
    """Return the number of this call, read past caches: it may begin before the last one ends."""
    return tl.load(counts, volatile=True)


@triton.jit
def is_open(counts, number):
    """Return whether no call before this one has given up; the same to all threads of a launch."""
    first = tl.load(counts + 2, volatile=True)
    return (first == 0) | (first > number)


@triton.jit
def give_up(counts, number, status, told):
    """Let no later call store anything, and tell of the word that did not come."""
    if tl.load(counts + 2, volatile=True) == 0:
        tl.store(counts + 2, number + 1)
    tell(status, told)


@triton.jit
def sendable(values):
    """Return the bits of values, none of them vacant. What is -0 goes as 0, as sums make it."""
    if values.dtype.primitive_bitwidth == 32:
        bits = values.to(tl.int32, bitcast=True)
        return tl.where((bits == _VACANT_32) | (bits == _MINUS_0), 0, bits)
    else:
        bits = values.to(tl.int16, bitcast=True)
        return tl.where(bits == _VACANT_16, 0, bits).to(tl.int16)


@triton.jit
def _now_ns(ON_GPU: tl.constexpr):  # noqa: N803
    """Return the time; 0 in the interpreter, which has no clock."""
    if ON_GPU:
        return tl.inline_asm_elementwise(_NOW_ASM, "=l", [], tl.int64, is_pure=False, pack=1)
    else:
        return tl.full((), 0, tl.int64)


@triton.jit
def _all_came(missing, stop, begin_ns, patience_ns, ON_GPU: tl.constexpr):  # noqa: N803
    """Return 1 if no thread misses anything, 2 if some thread gives up, else 0: to all alike."""
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
    COUNT: tl.constexpr,  # noqa: N803
    HAS_OWN: tl.constexpr,  # noqa: N803
    ON_GPU: tl.constexpr,  # noqa: N803
):
    """Await blocks of a mailbox; return their sum in float32, and -1. They are vacant then.

    It gives up as `await_words` does; then the number of a missing block comes with the sum.

    No block is smaller than the program: of an element that several threads have, each would see
    for itself whether it has come, but `tl.max` believes one of them for all.

    Args:
        at: pointers to a block's elements, [rows, cols].
        distance: elements from one block to the next, of COUNT.
        inside: which elements are awaited.
        stop: pointer to int32.
        patience_ns: int64.
        own: if HAS_OWN, the number of a block that is not in the mailbox.
        mine: what is added in its place, float32 [rows, cols].
        COUNT: blocks, which are added up in order.
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
    begin = _now_ns(ON_GPU)
    # The loop carries what is used behind it, and nothing else: Triton's compiler fails otherwise.
    state = tl.full((), 0, tl.int32)
    missing = tl.full((), 0, tl.int32)  # 1 + the number of a block that has not come
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
