"""The list of rows of a rank's experts: a stable counting sort of slots. Device code only.

A slot is one expert of one token; `ficco.kernels.experts` describes `routing` and its layout. A bin
is a local expert's own slots (2 x expert), or its other slots (2 x expert + 1). There are three
launches:

    experts_count   a program per chunk of CHUNK slots: the slots of each bin in the chunk, and the
                    number of each slot among those of its bin
    experts_scan    a program per bin: the slots of the bin in earlier chunks
    experts_place   each slot's place: the slots in earlier bins, those of the bin in earlier
                    chunks, and the slot's number in its chunk

The workspace has a line of `chunks` numbers for each bin, for each rank (slots of its experts), and
one for the first slot with an id past the last expert; then the sum of each line; then the number
of each slot.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import EXPERTS_COUNT, EXPERTS_PACK, EXPERTS_PLACE, EXPERTS_SCAN

_HEADER = tl.constexpr(4)  # as in `operators.routing`
_SCANNED = tl.constexpr(1024)  # numbers of a line that are added up at once
_BINS = tl.constexpr(128)  # bins that are added up at once
_RANKS = tl.constexpr(64)  # the most ranks


@triton.jit(do_not_specialize=EXPERTS_PACK.unknown)
def experts_pack(
    ids, gates, packed, count: tl.int32, length: tl.int32, limit: tl.int32, has_gates: tl.int32,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Store what a rank sends to all ranks: its limit, its ids, and the bits of its gates.

    ids: integers [count], above 2^31 - 1 they become this number. gates: float32 [count].
    packed: int32 [1 + length], and `length` more with gates. Behind `count` ids are -1, gates 0.
    """
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside, is_there = at < length, at < count
    id = tl.load(ids + at, mask=is_there, other=-1).to(tl.int64)
    id = tl.minimum(tl.maximum(id, -1), 0x7FFFFFFF).to(tl.int32)
    tl.store(packed + 1 + at, id, mask=inside)
    gate = tl.load(gates + at, mask=is_there & (has_gates > 0), other=0.0)
    bits = gate.to(tl.int32, bitcast=True)
    tl.store(packed + 1 + length + at, bits, mask=inside & (has_gates > 0))
    if tl.program_id(0) == 0:
        tl.store(packed, limit)


@triton.jit
def _bin_of(id, slot, experts, rank, own_begin, own_end):
    """Return the bin of each slot; 2 x experts if its expert is on another rank, or is none."""
    local = id - rank * experts
    mine = (local >= 0) & (local < experts)
    is_other = (slot < own_begin) | (slot >= own_end)
    return tl.where(mine, 2 * local + is_other.to(tl.int32), 2 * experts)


@triton.jit(do_not_specialize=EXPERTS_COUNT.unknown)
def experts_count(  # noqa: PLR0913 - a kernel's arguments are its interface
    ids,
    workspace,
    total: tl.int32,
    chunks: tl.int32,
    experts: tl.int32,
    world: tl.int32,
    rank: tl.int32,
    own_begin: tl.int32,
    own_end: tl.int32,
    CHUNK: tl.constexpr,
):
    """Count the slots of a chunk.

    ids: int32 [total].
    workspace: int32, receives a column of the lines, and the numbers of the chunk's slots.
    own_begin, own_end: the slots of this rank's tokens.
    """
    chunk = tl.program_id(0)
    bins = 2 * experts
    column = workspace + chunk
    numbers = workspace + (bins + world + 1) * (chunks + 1)
    lane = tl.arange(0, CHUNK)
    for first in tl.range(0, bins, CHUNK):
        bin = first + lane
        tl.store(column + bin * chunks, tl.zeros((CHUNK,), tl.int32), mask=bin < bins)
    tl.debug_barrier()  # all zeros are stored before a count
    slot = chunk * CHUNK + lane
    inside = slot < total
    id = tl.load(ids + slot, mask=inside, other=-1)
    bin = tl.where(inside, _bin_of(id, slot, experts, rank, own_begin, own_end), bins)
    # Of each slot, a column: the slots of its bin before it, and, in the upper half, all.
    same = bin[:, None] == bin[None, :]
    value = tl.where(lane[:, None] < lane[None, :], 0x10001, 0x10000)
    found = tl.sum(tl.where(same, value, 0), 0)  # of columns, which takes fewer exchanges
    number, count = found & 0xFFFF, found >> 16
    tl.store(numbers + slot, number, mask=inside)
    is_last = (bin < bins) & (number == count - 1)
    tl.store(column + bin * chunks, count, mask=is_last)
    owner = tl.where(id < 0, -1, id // experts)
    for other in tl.range(0, world):
        tl.store(column + (bins + other) * chunks, tl.sum((owner == other).to(tl.int32), 0))
    wrong = tl.min(tl.where(id >= experts * world, slot, total), 0)
    tl.store(column + (bins + world) * chunks, wrong)


@triton.jit(do_not_specialize=EXPERTS_SCAN.unknown)
def experts_scan(workspace, chunks: tl.int32, lines: tl.int32):
    """Replace the numbers of a line by the sums of those before them; the last line has a minimum.

    workspace: int32, receives these, and the sum or the minimum of each line.
    """
    line = tl.program_id(0)
    row = workspace + line * chunks
    before = 0
    least = 0x7FFFFFFF
    for first in tl.range(0, chunks, _SCANNED):
        at = first + tl.arange(0, _SCANNED)
        inside = at < chunks
        count = tl.load(row + at, mask=inside, other=0)
        least = tl.minimum(least, tl.min(tl.where(inside, count, 0x7FFFFFFF), 0))
        tl.store(row + at, before + tl.cumsum(count, 0) - count, mask=inside)
        before += tl.sum(count, 0)
    tl.store(workspace + lines * chunks + line, tl.where(line == lines - 1, least, before))


@triton.jit
def _store_head(routing, sums, total, rows, experts, world):
    """Store the first numbers of `routing`."""
    ranks = tl.arange(0, _RANKS)
    of_ranks = tl.load(sums + 2 * experts + ranks, mask=ranks < world, other=0)
    wrong = tl.load(sums + 2 * experts + world)
    tl.store(routing, rows)
    tl.store(routing + 1, tl.where(wrong < total, wrong + 1, 0))
    tl.store(routing + 2, tl.max(of_ranks, 0))
    tl.store(routing + 3, 0)


@triton.jit
def _note(ids, sums, limits, pitch, status, shown, tag, total, experts, world):  # noqa: PLR0913
    """Keep the first wrong id, or else the first rank above its limit, unless there is a fault."""
    ranks = tl.arange(0, _RANKS)
    is_rank = ranks < world
    counts = tl.load(sums + 2 * experts + ranks, mask=is_rank, other=0)
    limit = tl.load(limits + ranks * pitch, mask=is_rank, other=0x7FFFFFFF)
    full = tl.min(tl.where(counts > limit, ranks, _RANKS), 0)
    wrong = tl.load(sums + 2 * experts + world)
    is_wrong = wrong < total
    kind = tl.where(is_wrong, 2, tl.where(full < _RANKS, 1, 0))
    count = tl.sum(tl.where(ranks == full, counts, 0), 0)
    most = tl.sum(tl.where(ranks == full, limit, 0), 0)
    id = tl.load(ids + tl.where(is_wrong, wrong, 0), mask=is_wrong, other=0)
    if (kind > 0) & (tl.load(status) == 0):
        for words in tl.static_range(2):
            to = status if words == 0 else shown
            tl.store(to + 1, tl.where(is_wrong, wrong, full))
            tl.store(to + 2, tl.where(is_wrong, id, count))
            tl.store(to + 3, tl.where(is_wrong, tag, most))
            tl.debug_barrier()
            tl.store(to, kind)


@triton.jit(do_not_specialize=EXPERTS_PLACE.unknown)
def experts_place(  # noqa: PLR0913
    ids,
    workspace,
    routing,
    limits,
    status,
    shown,
    pitch: tl.int32,
    tag: tl.int32,
    notes: tl.int32,
    total: tl.int32,
    chunks: tl.int32,
    experts: tl.int32,
    world: tl.int32,
    rank: tl.int32,
    own_begin: tl.int32,
    own_end: tl.int32,
    CHUNK: tl.constexpr,
    PLACED: tl.constexpr,
):
    """Store PLACED slots at their places in the list, and the numbers before the list.

    ids, workspace, total to CHUNK: those of `experts_count`. `experts_scan` ran before.
    routing: int32, receives the result.
    limits, pitch: the most rows of each rank, `pitch` numbers apart.
    status, shown: int32 [4], keep the first fault; `shown` is host memory. See `experts.Faults`.
    tag: a number of the host, which a fault keeps.
    notes: whether faults are noted.
    """
    program = tl.program_id(0)
    bins = 2 * experts
    lines = bins + world + 1
    sums = workspace + lines * chunks
    numbers = sums + lines
    ends = routing + _HEADER
    own_ids = ends + bins
    slots = own_ids + (own_end - own_begin)
    slot = program * PLACED + tl.arange(0, PLACED)
    inside = slot < total
    id = tl.load(ids + slot, mask=inside, other=-1)
    bin = tl.where(inside, _bin_of(id, slot, experts, rank, own_begin, own_end), bins)
    listed = bin < bins
    place = tl.load(numbers + slot, mask=listed, other=0)
    place += tl.load(workspace + bin * chunks + slot // CHUNK, mask=listed, other=0)
    before = 0  # slots in earlier bins
    for first in tl.range(0, bins, _BINS):
        other = first + tl.arange(0, _BINS)
        sum = tl.load(sums + other, mask=other < bins, other=0)
        past = before + tl.cumsum(sum, 0)
        at = ends + (1 - other % 2) * experts + other // 2
        tl.store(at, past, mask=(other < bins) & (program == 0))
        here = (bin >= first) & (bin < first + _BINS)
        place += tl.where(here, tl.gather(past - sum, tl.where(here, bin - first, 0), 0), 0)
        before += tl.sum(sum, 0)
    is_own = inside & (slot >= own_begin) & (slot < own_end)
    tl.store(own_ids + slot - own_begin, id, mask=is_own)
    tl.store(slots + slot, tl.full((PLACED,), -1, tl.int32), mask=inside & (slot >= before))
    tl.store(slots + place, slot, mask=listed)
    if program == 0:
        _store_head(routing, sums, total, before, experts, world)
        if notes:
            _note(ids, sums, limits, pitch, status, shown, tag, total, experts, world)
