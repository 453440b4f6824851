"""The device code of a call that reads peers' products, in one launch.

Before the launch, a GEMM has stored this rank's products in the rank's window. All programs divide
the items: blocks of the result or, with two shots, chunks of the rows that this rank sums. The
first program, the door, also begins the handshake, and the last one to end finishes it:

    door      wait for free; clear it; raise entered at the peers
    program   wait for entered of all peers
              moves: read its blocks of each rank's rows into y; else:
              read all ranks' products of its items, add them up, store y
              two shots: also store the sums in the window, and signal each chunk
              two shots: wait for the peers' chunks of the same numbers, read their sums into y
    last      clear the words; raise free: all is read; wait for free of all peers

When a launch ends, all peers have read the window, so the next GEMM may store in it. A program
waits for no other program of its rank. At a peer it waits for the door, and for the program of its
own number, which stores its sums before it waits for sums. See `one_kernel_all_reduce_kernel` for
the order in which programs start.

All reads of peers' windows follow an acquire of the signal that the peer released behind its
stores. A matrix is read as one row of adjacent elements, so that any width is read in wide loads.
"""

from __future__ import annotations

from typing import Any  # noqa: F401 - of a comment; Triton reads no annotation

import triton
import triton.language as tl

from ficco.kernels.declarations import PULL
from ficco.kernels.one_kernel_handshake import tell
from ficco.kernels.signals import await_words, find_words, raise_found_words, raise_words
from ficco.plan import SIGNALS, Signal, signal_place
from ficco.plan.tables import GATES

__all__ = ["pulled_rows"]

_CHUNKS = tl.constexpr(SIGNALS["data"])  # words of one writer
_ENTERED = tl.constexpr(signal_place(Signal(0, "entered", 0)))
_FREE = tl.constexpr(signal_place(Signal(0, "free", 0)))
_GATES = tl.constexpr(GATES)
_ENDED = tl.constexpr(0)  # gate: programs that ended, and _GAVE_UP for each that gave up
_GAVE_UP = tl.constexpr(1 << 16)  # more than all programs


@triton.jit
def _bounds(  # noqa: PLR0913 - a kernel's arguments are its interface
    item,
    items,
    row,
    rows,
    m,
    n,
    SIZE: tl.constexpr,
    TWICE: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Return the first element of an item, and the one past its end."""
    if TWICE:  # rows of one rank: see `lowering.cutting.row_bounds`
        begin = (row + rows * item // items) * n
        end = (row + rows * (item + 1) // items) * n
    else:
        begin = tl.full((), SIZE, tl.int64) * item
        end = tl.minimum(begin + SIZE, m.to(tl.int64) * n)
    return tl.multiple_of(begin, EDGE), tl.multiple_of(end, EDGE)


@triton.jit
def _keep(y, values, at, i, inside, n, y_stride, FLAT: tl.constexpr):
    """Store elements at, at + 1, ... of the result."""
    if FLAT:
        tl.store(y + at + i, values, inside)
    else:
        row = (at + i) // n
        tl.store(y + row * y_stride + (at + i) % n, values, inside)


@triton.jit
def _tell_missing(words, stride, ranks, value, first, status):
    """Report the first of these ranks whose word does not have the value.

    words: of rank 0, the word of this index; first: its place among all words.
    """
    everyone = tl.arange(0, 64)
    waited = ((ranks >> everyone) & 1) != 0
    seen = tl.load(words + everyone * stride, mask=waited, other=0, volatile=True)
    late = tl.min(tl.where(waited & (seen != value), everyone, 64))
    if late < 64:
        tell(status, late * stride + first + 1)


@triton.jit
def _add_up(  # noqa: PLR0913 - a kernel's arguments are its interface
    bias,
    y,
    places,
    products_at,
    own_sums,
    own_row,
    own_rows,
    items,
    m,
    n,
    rank,
    peers,
    came,
    y_stride,
    WORLD: tl.constexpr,
    TWICE: tl.constexpr,
    BIAS: tl.constexpr,
    FLAT: tl.constexpr,
    SIZE: tl.constexpr,
    EDGE: tl.constexpr,
    BYTES: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Sum this program's items over all ranks; with two shots, store the sums for peers, too.

    products_at: address of each rank's products; own_sums: of this rank's sums; own_row, own_rows:
    this rank's first row, and its number of rows.
    """
    i = tl.arange(0, SIZE)
    past = items
    if TWICE:
        past = tl.where(own_rows == 0, 0, items)
    for item in tl.range(tl.program_id(0), past, tl.num_programs(0)):
        begin, end = _bounds(
            item, items, own_row, own_rows, m, n, SIZE, TWICE, EDGE
        )  # fmt: skip
        for start in tl.range(begin, end, SIZE):
            at = tl.multiple_of(start, EDGE)
            left = tl.minimum(end - start, SIZE).to(tl.int32)
            inside = i < tl.multiple_of(left, EDGE)
            parts = ()  # type: Any
            for source in tl.static_range(WORLD):  # all loads are issued before the first sum
                there = tl.multiple_of(products_at[source].to(y.dtype), BYTES) + at
                part = tl.load(there + i, mask=inside & (came != 0), other=0)
                parts = parts + (part,)  # noqa: RUF005 - Triton's way
            total = tl.zeros((SIZE,), tl.float32)
            for source in tl.static_range(WORLD):
                total += parts[source].to(tl.float32)
            if BIAS:
                total += tl.load(bias + (at + i) % n, mask=inside, other=0).to(tl.float32)
            if came == 0:
                total = tl.full((SIZE,), float("nan"), tl.float32)
            result = total.to(y.dtype.element_ty)
            if TWICE:
                tl.store(tl.multiple_of(own_sums.to(y.dtype), BYTES) + at + i, result, inside)
            _keep(y, result, at, i, inside, n, y_stride, FLAT)
        raised = tl.where((came != 0) & (begin < end), peers, 0)
        if TWICE:
            raise_words(places, rank * _CHUNKS + item, raised, 1, WORLD, ON_GPU)


@triton.jit
def _move(  # noqa: PLR0913
    y,
    places,
    n,
    rank,
    came,
    y_stride,
    WORLD: tl.constexpr,
    FLAT: tl.constexpr,
    SIZE: tl.constexpr,
    EDGE: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Read this program's blocks of the rows of each rank into y."""
    products, first = places + WORLD, places + 3 * WORLD
    i = tl.arange(0, SIZE)
    longest = tl.zeros((), tl.int64)
    for other in tl.static_range(WORLD):
        rows = tl.load(first + other + 1) - tl.load(first + other)
        longest = tl.maximum(longest, rows * n)
    for start in tl.range(tl.program_id(0) * SIZE, longest, tl.num_programs(0) * SIZE):
        pieces = ()  # type: Any
        for turn in tl.static_range(WORLD):  # all loads are issued before the first store
            source = (rank + turn) % WORLD
            there = tl.multiple_of(tl.load(products + source).to(y.dtype), BYTES)
            at = tl.multiple_of(tl.load(first + source) * n + start, EDGE)
            end = tl.multiple_of(tl.load(first + source + 1) * n, EDGE)
            piece = tl.load(there + at + i, mask=(at + i < end) & (came != 0), other=0)
            pieces = pieces + (piece,)  # noqa: RUF005 - Triton's way
        for turn in tl.static_range(WORLD):
            source = (rank + turn) % WORLD
            piece = pieces[turn]
            if came == 0:
                piece = tl.full((SIZE,), float("nan"), tl.float32).to(piece.dtype)
            at = tl.multiple_of(tl.load(first + source) * n + start, EDGE)
            end = tl.multiple_of(tl.load(first + source + 1) * n, EDGE)
            _keep(y, piece, at, i, at + i < end, n, y_stride, FLAT)


@triton.jit
def _collect(  # noqa: PLR0913
    y,
    places,
    words,
    stop,
    status,
    items,
    m,
    n,
    rank,
    owners,
    came,
    y_stride,
    patience_ns,
    WORLD: tl.constexpr,
    FLAT: tl.constexpr,
    SIZE: tl.constexpr,
    EDGE: tl.constexpr,
    BYTES: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Wait for the peers' chunks of this program's numbers, and read their sums into y."""
    sums, first = places + 2 * WORLD, places + 3 * WORLD
    i = tl.arange(0, SIZE)
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0)):
        awaited = tl.zeros_like(owners)  # those whose chunk of this number has rows
        for owner in tl.static_range(WORLD):
            rows = tl.load(first + owner + 1) - tl.load(first + owner)
            begin, end = _bounds(item, items, 0, rows, m, n, SIZE, True, EDGE)
            awaited |= tl.where(begin < end, owners & (1 << owner), 0)
        awaited = tl.where(came != 0, awaited, 0)
        arrived = came & await_words(
            words + item, _CHUNKS, awaited, 1, words, stop, patience_ns, False, WORLD, ON_GPU
        )
        if arrived == 0:
            patience_ns = tl.zeros_like(patience_ns)
            _tell_missing(words + item, _CHUNKS, awaited, 1, item, status)
        for turn in tl.static_range(1, WORLD):
            owner = (rank + turn) % WORLD
            row = tl.load(first + owner)
            rows = tl.load(first + owner + 1) - row
            source = tl.multiple_of(tl.load(sums + owner).to(y.dtype), BYTES)
            begin, end = _bounds(item, items, row, rows, m, n, SIZE, True, EDGE)
            for start in tl.range(begin, end, SIZE):
                at = tl.multiple_of(start, EDGE)
                left = tl.minimum(end - start, SIZE).to(tl.int32)
                inside = i < tl.multiple_of(left, EDGE)
                piece = tl.load(source + at + i, mask=inside & (arrived != 0), other=0)
                if arrived == 0:
                    piece = tl.full((SIZE,), float("nan"), tl.float32).to(piece.dtype)
                _keep(y, piece, at, i, inside, n, y_stride, FLAT)


@triton.jit
def _release(  # noqa: PLR0913
    found,
    places,
    words,
    gates,
    stop,
    status,
    items,
    rank,
    peers,
    owners,
    patience_ns,
    WORLD: tl.constexpr,
    TWICE: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Raise `free`, which says that this rank has read all windows; wait until the peers have.

    Before that, the words that peers raised are cleared: the first `items` signals of owners, if
    TWICE. The peers' `free` stays raised for the next call.
    """
    everyone = tl.arange(0, 64)
    of_peers = ((peers >> everyone) & 1) != 0
    tl.store(words + _ENTERED + everyone, tl.zeros_like(everyone), mask=of_peers)
    if TWICE:
        chunk = tl.arange(0, _CHUNKS)
        for owner in tl.static_range(WORLD):
            heard = (chunk < items) & (((owners >> owner) & 1) != 0)
            tl.store(words + owner * _CHUNKS + chunk, tl.zeros_like(chunk), mask=heard)
    raise_found_words(found, places, _FREE + rank, peers, 1, WORLD, ON_GPU)
    done = await_words(words + _FREE, 1, peers, 1, gates, stop, patience_ns, False, WORLD, ON_GPU)
    if done == 0:
        _tell_missing(words + _FREE, 1, peers, 1, _FREE, status)


@triton.jit(do_not_specialize=PULL.unknown)
def pulled_rows(  # noqa: PLR0913 - a kernel's arguments are its interface
    bias,
    y,
    places,
    gates,
    stop,
    status,
    digest: tl.int32,
    copy: tl.int32,
    copy_places: tl.int32,
    items: tl.int32,
    m: tl.int32,
    n: tl.int32,
    rank: tl.int32,
    peers: tl.int64,
    owners: tl.int64,
    y_stride: tl.int64,
    timeout_ns: tl.int64,
    WORLD: tl.constexpr,
    TWICE: tl.constexpr,
    MOVES: tl.constexpr,
    BIAS: tl.constexpr,
    FLAT: tl.constexpr,
    SIZE: tl.constexpr,
    EDGE: tl.constexpr,
    BYTES: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Store the sum over ranks of their products, which are in their windows, in y, or their rows.

    places: int64 [2, copy_places], of both copies of the window: addresses of each rank's words, of
    its products, and of its sums; if TWICE or MOVES, the first row of each rank in y, and m.
    Addresses of products are those of the first row of y in them.
    gates: int32: how many programs ended, and how many of them gave up the wait for `free` or
    `entered`; all 0 before and after.
    stop, status: int32. The status becomes 1 + the place of a word that did not arrive.
    copy: of the window. items: blocks of SIZE elements or, if TWICE, chunks of a rank's rows.
    bias: one row, added to the sums, if BIAS. m, n: rows and columns of y.
    MOVES: whether rows are copied, not added up.
    peers: set of all other ranks; owners: set of those that sum rows, if TWICE.
    timeout_ns: time limit of a program's wait.
    FLAT: whether the rows of y are adjacent.
    EDGE, BYTES: elements and bytes that divide the bounds of items, and addresses.
    """
    places += copy * copy_places
    words = tl.load(places + rank).to(tl.pointer_type(tl.int32))
    # What is read of the table is loaded before the waits, which would delay it.
    found = find_words(places, peers, ON_GPU)
    products_at = ()  # type: Any
    for source in tl.static_range(WORLD):
        products_at = products_at + (tl.load(places + WORLD + source),)  # noqa: RUF005 - Triton's way
    own_sums = tl.load(places + 2 * WORLD + rank)
    own_row = tl.load(places + 3 * WORLD + rank)
    own_rows = tl.load(places + 3 * WORLD + rank + 1) - own_row
    patience_ns = timeout_ns
    gave_up = tl.full((), 0, tl.int32)
    if tl.program_id(0) == 0:
        everyone = tl.arange(0, 64)
        of_peers = ((peers >> everyone) & 1) != 0
        free = await_words(
            words + _FREE, 1, peers, 1, gates, stop, patience_ns, False, WORLD, ON_GPU
        )
        if free != 0:
            # Before this rank enters: after that, peers may raise `free` again.
            tl.store(words + _FREE + everyone, tl.zeros_like(everyone), mask=of_peers)
            raise_found_words(found, places, _ENTERED + rank, peers, digest, WORLD, ON_GPU)
        else:
            gave_up = tl.full((), _GAVE_UP, tl.int32)
            _tell_missing(words + _FREE, 1, peers, 1, _FREE, status)
            patience_ns = tl.zeros_like(patience_ns)
    came = await_words(
        words + _ENTERED, 1, peers, digest, gates, stop, patience_ns, False, WORLD, ON_GPU
    )
    if came == 0:
        gave_up = tl.full((), _GAVE_UP, tl.int32)
        _tell_missing(words + _ENTERED, 1, peers, digest, _ENTERED, status)
        patience_ns = tl.zeros_like(patience_ns)
    if MOVES:
        _move(y, places, n, rank, came, y_stride, WORLD, FLAT, SIZE, EDGE, BYTES)
    else:
        _add_up(
            bias, y, places, products_at, own_sums, own_row, own_rows, items, m, n, rank, peers,
            came, y_stride, WORLD, TWICE, BIAS, FLAT, SIZE, EDGE, BYTES, ON_GPU,
        )  # fmt: skip
    if TWICE:
        _collect(
            y, places, words, stop, status, items, m, n, rank, owners, came, y_stride, patience_ns,
            WORLD, FLAT, SIZE, EDGE, BYTES, ON_GPU,
        )  # fmt: skip
    tl.debug_barrier()
    ended = tl.atomic_add(gates + _ENDED, 1 + gave_up, sem="acq_rel", scope="gpu") + 1 + gave_up
    # The last program to end knows that all others have read all that they read.
    if ended % _GAVE_UP == tl.num_programs(0):
        if ended < _GAVE_UP:
            _release(
                found, places, words, gates, stop, status, items, rank, peers, owners,
                patience_ns, WORLD, TWICE, ON_GPU,
            )  # fmt: skip
        tl.store(gates + tl.arange(0, _GATES), tl.zeros((_GATES,), tl.int32))
