"""A whole embedding_all_to_all of one rank in one launch. Device code only.

The first program is the door (see `one_kernel_handshake`). Every other program has one item: some
blocks of sums, each of one table, or rows to copy. Items follow each other in the order of
programs:

    blocks for peers: chunk 0 of each peer, chunk 1, ...     stored in the peers' windows; counted
    own blocks                                               stored in y
    rows from peers: chunk 0 of each peer, chunk 1, ...      copied from the window to y

The program that completes a chunk of a peer raises the chunk's signal there. Only items that copy
wait for peers. GPUs start programs in the order of their numbers (see
`one_kernel_all_reduce_kernel`), so no program waits for peers before all blocks for peers are under
way. The last user of the handshake's gates releases the window.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import POOL_AND_PUSH
from ficco.kernels.one_kernel_handshake import (
    MET,
    OPEN,
    give_back,
    leave,
    meet,
    open_window,
    tell,
)
from ficco.kernels.pooled_block import table_sums
from ficco.kernels.signals import await_if
from ficco.kernels.tuple_arguments import unpacked
from ficco.plan import SIGNALS, Signal, signal_place
from ficco.plan.tables import MOVES

__all__ = ["one_kernel_pool"]

_CHUNKS = tl.constexpr(SIGNALS["data"])  # words of one writer
_ENTERED = tl.constexpr(signal_place(Signal(0, "entered", 0)))
_FREE = tl.constexpr(signal_place(Signal(0, "free", 0)))

# Fields of a job, which has several items; `ficco.kernels.one_kernel_pool` writes them in this
# order.
_BEGIN = tl.constexpr(0)  # number of its first item
_PAST = tl.constexpr(1)  # number of the first item of the next job
_KIND = tl.constexpr(2)  # 0: blocks for a peer; 1: own blocks; 2: rows to copy
_PEER = tl.constexpr(3)  # the peer, or this rank
_BAG = tl.constexpr(4)  # its first bag
_ROWS = tl.constexpr(5)  # number of bags or rows
_TOP = tl.constexpr(6)  # its first row in the target
_LEFT = tl.constexpr(7)  # its first column in the target
_WIDTH = tl.constexpr(8)  # columns of all tables of the peer
_SIGNAL = tl.constexpr(9)  # index of its signal among a writer's
_FIELDS = tl.constexpr(10)
_SEND, _COPY = tl.constexpr(0), tl.constexpr(2)
_MOVES = tl.constexpr(MOVES)
# The gate that holds 1 + the place of a word that did not arrive. The status word is in host
# memory, and each read of it by a program takes about 1 us.
_MISSED = tl.constexpr(3)
_FAILED = tl.constexpr(1 << 30)  # bit in the count of a job: an item was not stored


@triton.jit
def _pool(  # noqa: PLR0913 - a kernel's arguments are its interface
    y,
    tables,
    strides,
    indices,
    offsets,
    ends,
    weights,
    places,
    gates,
    stop,
    job,
    item,
    blocks,
    batch,
    dim,
    means,
    weighted,
    y_stride,
    window_stride,
    timeout_ns,
    WORLD: tl.constexpr,
    LOOKUPS: tl.constexpr,
    BAGS: tl.constexpr,
    COLS: tl.constexpr,
    EDGE: tl.constexpr,
    BYTES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Store an item's blocks of sums in a peer's window or in y; return 0 if a wait gave up."""
    size: tl.constexpr = y.dtype.element_ty.primitive_bitwidth // 8
    sends = tl.load(job + _KIND) == _SEND
    peer, width, bags = tl.load(job + _PEER), tl.load(job + _WIDTH), tl.load(job + _ROWS)
    first, top, column = tl.load(job + _BAG), tl.load(job + _TOP), tl.load(job + _LEFT)
    at = tl.where(sends, tl.load(places + WORLD + peer), y.to(tl.int64))
    target_stride = tl.where(sends, window_stride, y_stride)
    panels = tl.cdiv(dim, COLS)
    across = width // dim * panels
    begun = (item - tl.load(job + _BEGIN)) * blocks
    ended = tl.minimum(begun + blocks, tl.cdiv(bags, BAGS) * across)
    opened = 1 - sends.to(tl.int32)
    for block in tl.range(begun, ended):
        number = block % across // panels
        left = tl.multiple_of(block % panels * COLS, COLS)
        place = block // across * BAGS + tl.arange(0, BAGS)
        bag = first + place
        exists = place < bags
        here = tl.multiple_of(tl.minimum(dim - left, COLS), EDGE)
        total = table_sums(
            tables, strides, indices, offsets, ends, weights, means, weighted, number, left, here,
            bag, exists, batch, BAGS, COLS, LOOKUPS, EDGE, BYTES, WEIGHTED,
        )  # fmt: skip
        if opened == 0:
            opened = await_if(
                opened == 0, gates + OPEN, 1, stop, timeout_ns, gates + _MISSED, _FREE + 1, False,
                ON_GPU,
            )  # fmt: skip
        rows = (top + place).to(tl.int64) * target_stride + (column + number * dim + left)
        targets = tl.multiple_of((at + rows * size).to(y.dtype), BYTES)
        col = tl.arange(0, COLS)
        tl.store(
            targets[:, None] + col[None, :], total.to(y.dtype.element_ty),
            mask=exists[:, None] & (col < here)[None, :] & (opened != 0),
        )  # fmt: skip
    return opened


@triton.jit
def _sent(counts, places, gates, job, rank, opened):
    """Count an item for a peer; with the last one of a job raise its signal, and leave.

    Return how many had left before, or -1. No signal is raised if an item was not stored.
    """
    peer, signal = tl.load(job + _PEER), tl.load(job + _SIGNAL)
    items = tl.load(job + _PAST) - tl.load(job + _BEGIN)
    word = tl.load(places + peer).to(tl.pointer_type(tl.int32)) + rank * _CHUNKS + signal
    count = counts + peer * _CHUNKS + signal
    before = tl.full((), -1, tl.int32)
    if opened == 0:
        tl.atomic_or(count, _FAILED, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    counted = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu")
    if counted % _FAILED == items - 1:
        tl.atomic_xchg(count, 0, sem="relaxed", scope="gpu")
        if counted < _FAILED:
            tl.atomic_xchg(word, 1, sem="release", scope="sys")
        before = leave(gates)
    return before


@triton.jit
def _copy(  # noqa: PLR0913
    y,
    places,
    gates,
    words,
    stop,
    job,
    item,
    rank,
    y_stride,
    window_stride,
    timeout_ns,
    WORLD: tl.constexpr,
    MOVE_ROWS: tl.constexpr,
    MOVE_COLS: tl.constexpr,
    EDGE: tl.constexpr,
    BYTES: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Wait for a chunk of a peer, and copy rows of it to y; NaN if it does not arrive."""
    size: tl.constexpr = y.dtype.element_ty.primitive_bitwidth // 8
    place = tl.load(job + _PEER) * _CHUNKS + tl.load(job + _SIGNAL)
    met = await_if(
        tl.full((), 1, tl.int32) != 0, gates + MET, 1, stop, timeout_ns, gates + _MISSED,
        _ENTERED + 1,
        False, ON_GPU,
    )  # fmt: skip
    came = met & await_if(
        met != 0, words + place, 1, stop, timeout_ns, gates + _MISSED, place + 1, False, ON_GPU
    )  # fmt: skip
    width = tl.multiple_of(tl.load(job + _WIDTH), EDGE)
    across = tl.cdiv(width, MOVE_COLS)
    within = item - tl.load(job + _BEGIN)
    first = within // across * MOVE_ROWS * _MOVES
    past = tl.minimum(first + MOVE_ROWS * _MOVES, tl.load(job + _ROWS))
    col = within % across * MOVE_COLS + tl.arange(0, MOVE_COLS)
    top, column = tl.load(job + _TOP), tl.load(job + _LEFT)
    window = tl.load(places + WORLD + rank)
    for begin in tl.range(first, past, MOVE_ROWS):
        row = begin + tl.arange(0, MOVE_ROWS)
        at = (top + row).to(tl.int64)
        sources = (window + (at * window_stride + column) * size).to(y.dtype)
        targets = (y.to(tl.int64) + (at * y_stride + column) * size).to(y.dtype)
        sources, targets = tl.multiple_of(sources, BYTES), tl.multiple_of(targets, BYTES)
        inside = (row < past)[:, None] & (col < width)[None, :]
        piece = tl.load(sources[:, None] + col[None, :], mask=inside & (came != 0), other=0)
        if came == 0:
            piece = tl.full((MOVE_ROWS, MOVE_COLS), float("nan"), tl.float32).to(piece.dtype)
        tl.store(targets[:, None] + col[None, :], piece, mask=inside)


@triton.jit(do_not_specialize=POOL_AND_PUSH.unknown)
def one_kernel_pool(  # noqa: PLR0913
    y,
    tables,
    strides,
    indices,
    offsets,
    ends,
    weights,
    jobs,
    counts,
    places,
    gates,
    stop,
    status,
    digest: tl.int32,
    copy: tl.int32,
    plan,
    batch: tl.int32,
    means: tl.int64,
    weighted: tl.int64,
    rank: tl.int32,
    sets,
    y_stride: tl.int64,
    window_stride: tl.int64,
    timeout_ns: tl.int64,
    WORLD: tl.constexpr,
    JOBS: tl.constexpr,
    LOOKUPS: tl.constexpr,
    BAGS: tl.constexpr,
    COLS: tl.constexpr,
    MOVE_ROWS: tl.constexpr,
    MOVE_COLS: tl.constexpr,
    EDGE: tl.constexpr,
    BYTES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Store in y the sums of this rank's bags of all ranks' tables, and others' in their windows.

    tables, strides: pointers to own tables, and elements from one row to the next, below 2^31.
    indices, offsets, ends: per table: rows of all bags, the first lookup of each of `batch` bags,
    and the number of lookups, where the last bag ends. Elements of these tuples beyond the own
    tables are not used.
    weights: per table, a factor per lookup; read if WEIGHTED.
    jobs: int32 [job_count, _FIELDS], job_count at most JOBS.
    counts: int32 [WORLD, _CHUNKS], and gates: int32, of the handshake; all 0 before and after.
    places: int64 [2, copy_places], addresses of both copies of the window: each rank's words, and
    each rank's receive buffer, whose columns are those of y.
    stop, status: int32. The status becomes 1 + the place of a word that did not arrive.
    copy: of the window. means, weighted: sets of tables.
    plan: blocks: blocks of an item, except for those that copy. leaving: number of jobs for peers,
    items that copy, and the door, which use the gates. dim: columns of a table. chunks: of a rank's
    bags.
    sets: all other ranks, and those that send.
    timeout_ns: time limit of a wait.
    EDGE, BYTES: elements that divide strides and dim; bytes that divide addresses.
    """
    copy_places, job_count, blocks, leaving, dim, chunks = unpacked(plan, tl.int32)
    peers, sources = unpacked(sets, tl.int64)
    places += copy * copy_places
    words = tl.load(places + rank).to(tl.pointer_type(tl.int32))
    item = tl.program_id(0) - 1
    number = tl.arange(0, JOBS)
    past = tl.load(jobs + number * _FIELDS + _PAST, mask=number < job_count, other=1 << 30)
    job = jobs + tl.sum((past <= item).to(tl.int32), 0) * _FIELDS
    kind = tl.load(job + _KIND)
    before = tl.full((), -1, tl.int32)
    if item < 0:
        opened = open_window(
            places, words, gates, stop, status, rank, peers, digest, timeout_ns, WORLD, ON_GPU
        )
        met = meet(
            words, gates, stop, status, peers, digest,
            tl.where(opened != 0, timeout_ns, tl.zeros_like(timeout_ns)), WORLD, ON_GPU,
        )  # fmt: skip
        if opened == 0:
            tl.store(gates + _MISSED, _FREE + 1)
        elif met == 0:
            tl.store(gates + _MISSED, _ENTERED + 1)
        before = leave(gates)
    elif kind == _COPY:
        _copy(
            y, places, gates, words, stop, job, item, rank, y_stride, window_stride,
            timeout_ns, WORLD, MOVE_ROWS, MOVE_COLS, EDGE, BYTES, ON_GPU,
        )  # fmt: skip
        before = leave(gates)
    else:
        opened = _pool(
            y, tables, strides, indices, offsets, ends, weights, places, gates, stop, job, item,
            blocks, batch, dim, means, weighted, y_stride, window_stride, timeout_ns,
            WORLD, LOOKUPS, BAGS, COLS, EDGE, BYTES, WEIGHTED, ON_GPU,
        )  # fmt: skip
        if kind == _SEND:
            before = _sent(counts, places, gates, job, rank, opened)
    if before == leaving - 1:
        missed = tl.load(gates + _MISSED, volatile=True)
        if missed != 0:
            tell(status, missed)
        everyone = tl.arange(0, 64)
        of_sources = ((sources >> everyone) & 1) != 0
        of_peers = ((peers >> everyone) & 1) != 0
        for chunk in tl.range(0, chunks):
            heard = words + everyone * _CHUNKS + chunk
            tl.store(heard, tl.zeros_like(everyone), mask=of_sources)
            sent = counts + everyone * _CHUNKS + chunk
            tl.store(sent, tl.zeros_like(everyone), mask=of_peers)
        give_back(places, gates, rank, peers, WORLD, ON_GPU)
