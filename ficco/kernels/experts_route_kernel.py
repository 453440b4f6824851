"""The list of rows of a rank's experts: a stable counting sort of slots. Device code only.

A slot is one expert of one token; `routing` and its layout are described in `ficco.kernels.experts`.
A bin is a local expert's own slots (2 x expert), or its other slots (2 x expert + 1). Programs take
chunks of CHUNK slots. The first kernel counts the slots of each bin in each chunk. The second one
adds up the counts of earlier chunks, sorts its chunk by bin, and stores each slot at its place.
Integers are added, so the result depends on no order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import EXPERTS_COUNT, EXPERTS_PLACE

_HEADER = tl.constexpr(4)  # numbers of `routing` before the ends; as in `experts`
_CHUNKS, _BINS = tl.constexpr(32), tl.constexpr(128)  # counts that are added up at once
_RANKS = tl.constexpr(64)  # the most ranks


@triton.jit
def _bin_of(id, slot, experts, world, rank, own_begin, own_end):
    """Return the bin of each slot; 2 x experts if its expert is on another rank, or is none."""
    local = id - rank * experts
    mine = (local >= 0) & (local < experts)
    is_other = (slot < own_begin) | (slot >= own_end)
    return tl.where(mine, 2 * local + is_other.to(tl.int32), 2 * experts)


@triton.jit(do_not_specialize=EXPERTS_COUNT.unknown)
def experts_count(
    ids,
    counts,
    total: tl.int32,
    experts: tl.int32,
    world: tl.int32,
    rank: tl.int32,
    own_begin: tl.int32,
    own_end: tl.int32,
    CHUNK: tl.constexpr,
):
    """Count the slots of a chunk by bin, and by the rank of their expert.

    ids: int32 [total].
    counts: int32 [chunks, 2 x experts + world + 1], receives the number of slots in each bin, those
        for each rank, and the first slot whose expert is past the last one, or `total`.
    own_begin, own_end: the slots of this rank's tokens.
    """
    chunk = tl.program_id(0)
    bins = 2 * experts
    row = counts + chunk * (bins + world + 1)
    lane = tl.arange(0, CHUNK)
    for at in tl.range(0, bins + world, CHUNK):
        tl.store(row + at + lane, tl.zeros((CHUNK,), tl.int32), mask=at + lane < bins + world)
    tl.debug_barrier()  # all zeros are stored before a thread counts
    slot = chunk * CHUNK + lane
    inside = slot < total
    id = tl.load(ids + slot, mask=inside, other=-1)
    one = tl.full((CHUNK,), 1, tl.int32)
    bin = _bin_of(id, slot, experts, world, rank, own_begin, own_end)
    tl.atomic_add(row + bin, one, mask=inside & (bin < bins), sem="relaxed")
    owner = id // experts
    valid = inside & (id >= 0) & (owner < world)
    tl.atomic_add(row + bins + owner, one, mask=valid, sem="relaxed")
    beyond = inside & (id >= experts * world)
    tl.store(row + bins + world, tl.min(tl.where(beyond, slot, total), 0))


@triton.jit
def _sums(counts, chunk, chunks, pitch, bin, is_bin):
    """Return the counts of some bins: of earlier chunks, and of all."""
    earlier = tl.zeros((_BINS,), tl.int32)
    all_chunks = tl.zeros((_BINS,), tl.int32)
    for first in tl.range(0, chunks, _CHUNKS):
        other = first + tl.arange(0, _CHUNKS)[:, None]
        at = counts + other * pitch + bin[None, :]
        count = tl.load(at, mask=(other < chunks) & is_bin[None, :], other=0)
        earlier += tl.sum(tl.where(other < chunk, count, 0), 0)
        all_chunks += tl.sum(count, 0)
    return earlier, all_chunks


@triton.jit
def _store_head(routing, counts, chunks, pitch, total, rows, experts, world):
    """Store the first numbers of `routing`."""
    ranks = tl.arange(0, _RANKS)
    sums = tl.zeros((_RANKS,), tl.int32)
    first_wrong = tl.zeros((_CHUNKS,), tl.int32) + total
    for first in tl.range(0, chunks, _CHUNKS):
        chunk = first + tl.arange(0, _CHUNKS)
        at = counts + chunk[:, None] * pitch + 2 * experts + ranks[None, :]
        inside = (chunk < chunks)[:, None] & (ranks < world)[None, :]
        sums += tl.sum(tl.load(at, mask=inside, other=0), 0)
        wrong = tl.load(counts + chunk * pitch + pitch - 1, mask=chunk < chunks, other=total)
        first_wrong = tl.minimum(first_wrong, wrong)
    slot = tl.min(first_wrong, 0)
    tl.store(routing, rows)
    tl.store(routing + 1, tl.where(slot < total, slot + 1, 0))
    tl.store(routing + 2, tl.max(sums, 0))
    tl.store(routing + 3, 0)


@triton.jit(do_not_specialize=EXPERTS_PLACE.unknown)
def experts_place(
    ids,
    counts,
    shifts,
    routing,
    total: tl.int32,
    chunks: tl.int32,
    experts: tl.int32,
    world: tl.int32,
    rank: tl.int32,
    own_begin: tl.int32,
    own_end: tl.int32,
    CHUNK: tl.constexpr,
):
    """Store each slot of a chunk at its place in the list, and the numbers before the list.

    ids, counts, total, experts, world, rank, own_begin, own_end: those of `experts_count`.
    shifts: int32 [chunks, 2 x experts], receives for each bin the place of its first slot of the
        chunk, less that slot's place in the sorted chunk.
    routing: int32, receives the result.
    """
    chunk = tl.program_id(0)
    bins = 2 * experts
    pitch = bins + world + 1
    own_shifts = shifts + chunk * bins
    ends = routing + _HEADER
    before, before_here = 0, 0  # slots in earlier bins, and those of this chunk
    for first in tl.range(0, bins, _BINS):
        bin = first + tl.arange(0, _BINS)
        is_bin = bin < bins
        earlier, all_chunks = _sums(counts, chunk, chunks, pitch, bin, is_bin)
        here = tl.load(counts + chunk * pitch + bin, mask=is_bin, other=0)
        past = before + tl.cumsum(all_chunks, 0)
        past_here = before_here + tl.cumsum(here, 0)
        shift = (past - all_chunks + earlier) - (past_here - here)
        tl.store(own_shifts + bin, shift, mask=is_bin)
        is_other = bin % 2
        at = ends + (1 - is_other) * experts + bin // 2
        tl.store(at, past, mask=is_bin & (chunk == 0))
        before += tl.sum(all_chunks, 0)
        before_here += tl.sum(here, 0)
    tl.debug_barrier()  # all shifts are stored before a thread loads one
    lane = tl.arange(0, CHUNK)
    slot = chunk * CHUNK + lane
    inside = slot < total
    id = tl.load(ids + slot, mask=inside, other=-1)
    own_ids = ends + 2 * experts
    is_own = inside & (slot >= own_begin) & (slot < own_end)
    tl.store(own_ids + slot - own_begin, id, mask=is_own)
    slots = own_ids + (own_end - own_begin)
    tl.store(slots + slot, tl.full((CHUNK,), -1, tl.int32), mask=inside & (slot >= before))
    bin = _bin_of(id, slot, experts, world, rank, own_begin, own_end)
    sorted_lanes = tl.sort(bin * CHUNK + lane)  # each key is unique, so the order is stable
    bin = sorted_lanes // CHUNK
    listed = bin < bins
    place = lane + tl.load(own_shifts + bin, mask=listed, other=0)
    tl.store(slots + place, chunk * CHUNK + sorted_lanes % CHUNK, mask=listed)
    if chunk == 0:
        _store_head(routing, counts, chunks, pitch, total, before, experts, world)
