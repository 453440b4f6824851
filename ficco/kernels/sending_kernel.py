"""The device code of calls that send: programs store rows or products at peers, in one launch.

Programs are in the order of their work. A program of an earlier kind waits for none of a later
kind, on any rank:

    program 0      the door: the handshake
    senders        copy rows of x to peers, chunk by chunk        FINISH = MULTIPLY, KEEP
    push tiles     multiply, store at the peer                    the others
    own tiles      multiply; MULTIPLY, MOVE: store in y
                   SUM, SHARE: wait for all terms, add them, store; SHARE: also at all peers
    arrival tiles  wait for rows of x, multiply                   MULTIPLY
    moves          wait for rows, copy them to the result         MOVE, SHARE, KEEP; x that is kept

GPUs start programs in the order of their numbers. So when a program waits, all programs of earlier
kinds of its rank have started, and they end; a launch thus ends on any number of free
multiprocessors. With fewer programs than jobs, each program takes its jobs in order, and all
programs of a launch must run at the same time.

A chunk of a pair of ranks has one signal. The programs that store it count; the last one raises the
signal, after the stores of all. The last program to end clears the signals and releases the window.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import SENDING
from ficco.kernels.one_kernel_handshake import MET, OPEN, give_back, leave, meet, open_window, tell
from ficco.kernels.signals import await_words, fence_bulk_loads, raise_words
from ficco.kernels.sum_epilogue import halves, quarter
from ficco.kernels.tile_product import (
    AWAITED,
    AWAY,
    COLUMN,
    COLUMNS_END,
    COUNT,
    HEIGHT,
    PART,
    PLACE_FIELDS,
    RAISED,
    ROW,
    SOURCE_ROW,
    TARGET_ROW,
    multiplied,
    store_tile,
)
from ficco.kernels.tuple_arguments import element, unpacked
from ficco.plan import SIGNALS, Signal, signal_place

_CHUNKS = tl.constexpr(SIGNALS["data"])  # words of one writer
_ENTERED, _FREE = (tl.constexpr(signal_place(Signal(0, name, 0))) for name in ("entered", "free"))
# `tables.FINISHES`
_MULTIPLY, _MOVE, _SUM, _SHARE, _KEEP = (tl.constexpr(i) for i in range(5))
_MISSED = tl.constexpr(3)  # of the gates: 1 + the place of a word that did not arrive
_SENT_ROWS, _SENT_COLS = tl.constexpr(16), tl.constexpr(512)  # that a sender copies at once


@triton.jit
def _await(  # noqa: PLR0913 - a kernel's arguments are its interface
    words, first, ranks, gates, gate, stop, timeout_ns, WORLD: tl.constexpr, ON_GPU: tl.constexpr
):
    """Return 1 once a gate is open and the word `first` of each of these ranks has come, else 0."""
    patience_ns = tl.where(tl.load(gates + _MISSED, volatile=True) == 0, timeout_ns, 0)
    came = await_words(
        words + first, _CHUNKS, ranks, 1, gates + gate, stop, patience_ns, True, WORLD, ON_GPU
    )
    if came == 0:
        everyone = tl.arange(0, 64)
        places = first + everyone * _CHUNKS
        asked = ((ranks >> everyone) & 1) != 0
        seen = tl.load(words + places, mask=asked, other=1, volatile=True)
        late = tl.max(tl.where(seen != 1, places + 1, 0))
        if late > 0:
            tl.atomic_max(gates + _MISSED, late, sem="relaxed", scope="gpu")
    return came


@triton.jit
def _count(counters, job, total, places, rank, ranks, WORLD: tl.constexpr, ON_GPU: tl.constexpr):
    """Count a part's stores by this program; as the last of `total`, raise its signal at ranks.

    The count is at system scope: it follows the stores at peers of the programs before.
    """
    tl.debug_barrier()
    before = tl.atomic_add(counters + tl.load(job + PART), 1, sem="acq_rel", scope="sys")
    if before == total - 1:
        word = rank * _CHUNKS + tl.load(job + RAISED)
        raise_words(places, word, ranks, 1, WORLD, ON_GPU)


@triton.jit
def _window_at(places, rank, kind, like, BYTES: tl.constexpr):
    """Return a rank's window of sent rows, or, if `kind` is 2, of sums."""
    return tl.multiple_of(tl.load(places + rank + kind).to(like.dtype), BYTES)


@triton.jit
def _send(  # noqa: PLR0913
    x, kept, jobs, counters, places, gates, words, stop, program, senders, groups, rank, k,
    x_stride, kept_stride, timeout_ns,
    WORLD: tl.constexpr, BYTES: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Copy this program's rows of each chunk of x to the peer that gets it; own rows to `kept`."""
    opened = _await(words, 0, tl.zeros((), tl.int64), gates, OPEN, stop, timeout_ns, WORLD, ON_GPU)
    for group in tl.range(0, groups):
        job = jobs + group * PLACE_FIELDS
        peer = tl.load(job + AWAY)
        allowed = (opened != 0) | (peer == rank)  # `kept` is of this call alone
        first, top = tl.load(job), tl.load(job + TARGET_ROW)
        rows = tl.where(allowed, tl.load(job + HEIGHT), 0)
        window, pitch = _window_at(places, peer, WORLD, x, BYTES), k.to(tl.int64)
        if peer == rank:
            window, pitch = tl.multiple_of(kept.to(x.dtype), BYTES), kept_stride
        across = tl.cdiv(k, _SENT_COLS)
        for block in tl.range(program, tl.cdiv(rows, _SENT_ROWS) * across, senders):
            row = block // across * _SENT_ROWS + tl.arange(0, _SENT_ROWS)
            col = block % across * _SENT_COLS + tl.arange(0, _SENT_COLS)
            inside = (row < rows)[:, None] & (col < k)[None, :]
            here = x + (first + row).to(tl.int64)[:, None] * x_stride + col[None, :]
            there = window + (top + row).to(tl.int64)[:, None] * pitch + col[None, :]
            tl.store(there, tl.load(here, mask=inside), mask=inside)
        total = tl.where(allowed & (peer != rank), senders, 0)  # own rows have no signal
        of_peer = tl.full((), 1, tl.int64) << peer
        _count(counters, job, total, places, rank, of_peer, WORLD, ON_GPU)


@triton.jit
def _store_sum(  # noqa: PLR0913
    product, window, slot_tops, y, job, rank, n, y_stride, bias, has_bias, came,
    WORLD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, COL_STEP: tl.constexpr,
):  # fmt: skip
    """Store a tile of own products plus those of all peers, in the order of ranks, plus the bias.

    The order and the roundings are those of `sum_epilogue`.
    """
    SLICES: tl.constexpr = 8 if (WORLD > 4) & (COLS > 128) else 4  # noqa: N806 - else it spills
    WIDTH: tl.constexpr = COLS // SLICES  # noqa: N806
    first = tl.load(job + COLUMN) // COL_STEP * COL_STEP
    end = tl.load(job + COLUMNS_END) // COL_STEP * COL_STEP
    row = tl.arange(0, ROWS)
    target, in_part, rows = tl.load(job + TARGET_ROW), tl.load(job + ROW), tl.load(job + HEIGHT)
    for i in tl.static_range(SLICES):
        col = first + i * WIDTH + tl.arange(0, WIDTH)
        inside = (row < rows)[:, None] & (col < end)[None, :]
        own = quarter(product, i * 4 // SLICES, ROWS, COLS)
        if SLICES == 8:
            left, right = halves(own, ROWS, COLS // 4)
            own = left if i % 2 == 0 else right
        total = tl.zeros((ROWS, WIDTH), tl.float32)
        for source in tl.static_range(WORLD):
            at = (tl.load(slot_tops + source) + in_part + row).to(tl.int64)
            arrived = inside & (came != 0) & (source != rank)
            term = tl.load(window + at[:, None] * n + col[None, :], mask=arrived, other=0)
            if source == 0:  # the first term is not added to a zero, which would lose a sign
                total = tl.where(rank == 0, own, total + term.to(tl.float32))
            else:
                total += tl.where(rank == source, own, term.to(tl.float32))
        added = tl.load(bias + col, mask=(col < end) & (has_bias != 0), other=0)
        total += added.to(tl.float32)[None, :]
        total = tl.where(came != 0, total, float("nan"))
        at_y = y + (target + row).to(tl.int64)[:, None] * y_stride + col[None, :]
        tl.store(at_y, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _copy_tile(  # noqa: PLR0913
    source, source_row, source_stride, target, target_stride, job, came,
    ROWS: tl.constexpr, COLS: tl.constexpr, COL_STEP: tl.constexpr,
):  # fmt: skip
    """Copy a tile's rows from `source` to its rows of `target`; NaN if they have not come."""
    row = tl.arange(0, ROWS)
    first = tl.load(job + COLUMN) // COL_STEP * COL_STEP
    end = tl.load(job + COLUMNS_END) // COL_STEP * COL_STEP
    col = first + tl.arange(0, COLS)
    inside = (row < tl.load(job + HEIGHT))[:, None] & (col < end)[None, :]
    here = source + (source_row + row).to(tl.int64)[:, None] * source_stride + col[None, :]
    piece = tl.load(here, mask=inside & (came != 0), other=0)
    if came == 0:
        piece = tl.full((ROWS, COLS), float("nan"), tl.float32).to(piece.dtype)
    at = (tl.load(job + TARGET_ROW) + row).to(tl.int64)
    tl.store(target + at[:, None] * target_stride + col[None, :], piece, mask=inside)


@triton.jit(do_not_specialize=SENDING.unknown)
def sending_gemm(  # noqa: PLR0912, PLR0913, PLR0915
    own, window, b, x, w, bias, y, kept, jobs, slot_tops, counters, places, gates, stop, status,
    digest: tl.int32, copy: tl.int32, rank: tl.int32, peers: tl.int64, timeout_ns: tl.int64,
    sizes, n: tl.int32, k: tl.int32, strides,
    WORLD: tl.constexpr, FINISH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    DEEP: tl.constexpr, OWN_BULK: tl.constexpr, WINDOW_BULK: tl.constexpr, B_BULK: tl.constexpr,
    B_TURNED: tl.constexpr, COL_STEP: tl.constexpr, BYTES: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Multiply, store at peers, and finish what peers have stored here; see `SendTable`.

    own, window: descriptors or pointers, as in `gated_gemm`; window: of rows of x, see FINISH.
    b: the descriptor of the weight, if B_BULK is set; else it is not read.
    x: pointer to the same rows as own; kept: to x of all ranks, or to y.
    w, bias, y: tuples of pointers to the weight, the bias and the result of each product. There is
    one product, but if rows of x travel.
    jobs: int32 [jobs, PLACE_FIELDS], see `tile_product`, in the order of their kinds. AWAY is the
    peer that gets or has sent the rows; RAISED and AWAITED are the numbers of chunks. RAISED of
    tiles with several products is the number of the product.
    slot_tops: int32 [WORLD], the first row of each rank's terms in the window.
    counters: int32 [parts], and gates: int32, of the handshake; all 0 before and after.
    places: int64 [2, copy_places], addresses of both copies of the windows: each rank's words, each
    rank's window of sent rows, and, if FINISH is SHARE, each rank's window of sums.
    stop, status: int32. The status becomes 1 + the place of a word that did not arrive.
    copy: of the window. timeout_ns: time limit of a wait.
    sizes: copy_places, parts, words (chunks with signals), biases (products with one, as bits),
    senders, and the numbers of the first own tile, arrival tile and move among the jobs, and of
    jobs; those before are groups of rows that senders copy, or push tiles.
    n: columns of products that travel; k: depth.
    strides: of own, window, x and kept; and for each product, those of y, and from row to row and
    from column to column of w. A stride that is 1 by B_TURNED, or of a descriptor, is not read.
    FINISH: see `tables.FINISHES`. BYTES: bytes that divide addresses.
    COL_STEP: divisor of the first columns of tiles, of n and of k.
    """
    (
        copy_places,
        parts,
        chunk_words,
        biases,
        senders,
        first_own,
        first_arrival,
        first_move,
        count,
    ) = unpacked(sizes, tl.int32)
    own_stride, window_stride = tl.cast(strides[0], tl.int64), tl.cast(strides[1], tl.int64)
    x_stride, kept_stride = tl.cast(strides[2], tl.int64), tl.cast(strides[3], tl.int64)
    PRODUCTS: tl.constexpr = len(y)  # noqa: N806
    kind: tl.constexpr = y[0].dtype
    program, programs = tl.program_id(0), tl.num_programs(0)
    senders = tl.minimum(senders, tl.maximum((programs - 1) // 2, 1))  # if others share the device
    places += copy * copy_places
    words = tl.load(places + rank).to(tl.pointer_type(tl.int32))
    steps = tl.cdiv(k, DEEP)
    begin = count
    if program == 0:
        opened = open_window(
            places, words, gates, stop, status, rank, peers, digest, timeout_ns, WORLD, ON_GPU
        )
        met = meet(
            words, gates, stop, status, peers, digest, tl.where(opened != 0, timeout_ns, 0),
            WORLD, ON_GPU,
        )  # fmt: skip
        if (opened == 0) | (met == 0):
            missed = tl.where(opened == 0, _FREE + 1, _ENTERED + 1)
            tl.atomic_max(gates + _MISSED, missed, sem="relaxed", scope="gpu")
    elif program > senders:
        begin = program - 1 - senders
        if (FINISH == _MULTIPLY) | (FINISH == _KEEP):
            begin += first_own
    elif (FINISH == _MULTIPLY) | (FINISH == _KEEP):
        _send(
            x, kept, jobs, counters, places, gates, words, stop, program - 1, senders, first_own,
            rank, k, x_stride, kept_stride, timeout_ns, WORLD, BYTES, ON_GPU,
        )  # fmt: skip

    for number in tl.range(begin, count, tl.maximum(programs - 1 - senders, 1)):
        job = jobs + number * PLACE_FIELDS
        peer = tl.load(job + AWAY)
        of_peer = tl.full((), 1, tl.int64) << peer
        chunk = tl.load(job + AWAITED)
        came = 1
        product = 0
        if PRODUCTS > 1:
            product = tl.load(job + RAISED)
        target = tl.multiple_of(element(y, product).to(kind), BYTES)
        added = tl.multiple_of(element(bias, product).to(kind), BYTES)
        has_bias = (biases >> product) & 1
        y_stride = element(strides, 4 + 3 * product)
        b_deep_stride = element(strides, 5 + 3 * product)
        b_col_stride = element(strides, 6 + 3 * product)
        if B_BULK:  # noqa: SIM108 - Triton's way
            weight = b
        else:
            weight = tl.multiple_of(element(w, product).to(x.dtype), BYTES)
        if number >= first_move:
            if FINISH == _SHARE:
                came = _await(words, chunk, of_peer, gates, MET, stop, timeout_ns, WORLD, ON_GPU)
                source = _window_at(places, rank, 2 * WORLD, target, BYTES)
                _copy_tile(
                    source, tl.load(job + SOURCE_ROW), n, target, y_stride, job, came,
                    ROWS, COLS, COL_STEP,
                )  # fmt: skip
            elif FINISH != _SUM:
                came = _await(words, chunk, of_peer, gates, MET, stop, timeout_ns, WORLD, ON_GPU)
                source = _window_at(places, rank, WORLD, target, BYTES)
                if FINISH == _MOVE:
                    _copy_tile(
                        source, tl.load(job + SOURCE_ROW), n, target, y_stride, job, came,
                        ROWS, COLS, COL_STEP,
                    )  # fmt: skip
                else:
                    _copy_tile(
                        source, tl.load(job + SOURCE_ROW), k, kept, kept_stride, job, came,
                        ROWS, COLS, COL_STEP,
                    )  # fmt: skip
        elif number >= first_arrival:
            if FINISH == _MULTIPLY:
                came = _await(words, chunk, of_peer, gates, MET, stop, timeout_ns, WORLD, ON_GPU)
                if WINDOW_BULK:
                    fence_bulk_loads(ON_GPU)
                total = multiplied(
                    window, job, window_stride, weight, b_deep_stride, b_col_stride, 0, steps, k,
                    ROWS, COLS, DEEP, WINDOW_BULK, B_BULK, B_TURNED, ON_GPU,
                )  # fmt: skip
                total = tl.where(came != 0, total, float("nan"))
                store_tile(
                    total, target, job, y_stride, added, has_bias, ROWS, COLS, COL_STEP, False
                )
        elif FINISH != _KEEP:
            total = multiplied(
                own, job, own_stride, weight, b_deep_stride, b_col_stride, 0, steps, k,
                ROWS, COLS, DEEP, OWN_BULK, B_BULK, B_TURNED, ON_GPU,
            )  # fmt: skip
            if FINISH == _MULTIPLY:
                store_tile(
                    total, target, job, y_stride, added, has_bias, ROWS, COLS, COL_STEP, False
                )
            elif number < first_own:
                opened = _await(
                    words, 0, tl.zeros((), tl.int64), gates, OPEN, stop, timeout_ns, WORLD, ON_GPU
                )
                if opened != 0:
                    there = _window_at(places, peer, WORLD, target, BYTES)
                    store_tile(total, there, job, n, added, 0, ROWS, COLS, COL_STEP, False)
                    _count(
                        counters, job, tl.load(job + COUNT), places, rank, of_peer, WORLD, ON_GPU
                    )
            elif FINISH == _MOVE:
                store_tile(
                    total, target, job, y_stride, added, has_bias, ROWS, COLS, COL_STEP, False
                )
            else:
                came = _await(words, chunk, peers, gates, MET, stop, timeout_ns, WORLD, ON_GPU)
                arrived = _window_at(places, rank, WORLD, target, BYTES)
                _store_sum(
                    total, arrived, slot_tops, target, job, rank, n, y_stride, added, has_bias,
                    came, WORLD, ROWS, COLS, COL_STEP,
                )  # fmt: skip
                if FINISH == _SHARE:
                    tl.debug_barrier()
                    if came != 0:
                        for turn in tl.static_range(1, WORLD):
                            sums = _window_at(
                                places, (rank + turn) % WORLD, 2 * WORLD, target, BYTES
                            )
                            _copy_tile(
                                target, tl.load(job + TARGET_ROW), y_stride, sums, n, job, 1,
                                ROWS, COLS, COL_STEP,
                            )  # fmt: skip
                        _count(
                            counters, job, tl.load(job + COUNT), places, rank, peers, WORLD, ON_GPU
                        )

    if leave(gates) == programs - 1:
        missed = tl.load(gates + _MISSED, volatile=True)
        if missed != 0:
            tell(status, missed)
        everyone = tl.arange(0, 64)
        of_peers = ((peers >> everyone) & 1) != 0
        for number in tl.range(0, chunk_words):
            heard = words + everyone * _CHUNKS + number
            tl.store(heard, tl.zeros_like(everyone), mask=of_peers)
        for first in tl.range(0, parts, 64):
            tl.store(
                counters + first + everyone, tl.zeros_like(everyone),
                mask=first + everyone < parts,
            )  # fmt: skip
        give_back(places, gates, rank, peers, WORLD, ON_GPU)
