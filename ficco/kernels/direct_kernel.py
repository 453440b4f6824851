"""The direct kernel's device code: a whole matmul_all_reduce of one rank in one launch.

All programs of a launch run at the same time. The last of them keeps the door; the others share the
chunks, which are slices of columns, and each takes its chunks through all stages:

    door      await free, clear it | open the gate, enter | await entered
    program   make: multiply, or take from y what a library multiplied; store at the owners, raise
              (behind the gate)
              finish: await the others' products, add them up, store and, as an owner, pass on
              collect: await the owners' sums, move them into y

A lone program does both. The last program to end raises free at the peers. Nothing waits before
everything is made, and no program waits for another one of its rank but at the gate, whose keeper
makes nothing. Loops must be neither flattened nor spread over specialized warps: loads would move
ahead of waits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.direct_handshake import MET, OPEN, give_back, leave, meet, open_window, tell
from ficco.kernels.direct_product import product
from ficco.kernels.many_words import await_words, raise_words
from ficco.plan import WORDS

__all__ = ["UNSPECIALIZED", "direct_all_reduce"]

_CHUNKS = tl.constexpr(WORDS["data"])  # words of one writer

# Fields of a chunk.
_BEGIN, _END, _PARTIAL, _SUM = (tl.constexpr(i) for i in range(4))
_FIELDS = tl.constexpr(4)

# The compiler learns nothing about these, so they never make another kernel.
UNSPECIALIZED = (
    "digest", "copy", "copy_places", "items", "m", "rank", "own_row", "own_rows", "bias_row",
    "bias_rows", "slot_rows", "peers", "targets", "owners", "timeout_ns",
)  # fmt: skip


@triton.jit
def _rows_at(addresses, row, rows, y, BYTES: tl.constexpr):  # noqa: N803
    """Return pointers to rows, from a table of their addresses."""
    at = tl.load(addresses + row, mask=row < rows, other=0).to(y.dtype)
    return tl.multiple_of(at, BYTES)[:, None]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def direct_all_reduce(  # noqa: PLR0912, PLR0913, PLR0915
    x,
    w,
    bias,
    y,
    chunks,
    places,
    gates,
    stop,
    status,
    digest: tl.int32,
    copy: tl.int32,
    copy_places: tl.int32,
    items: tl.int32,
    m: tl.int32,
    n,
    k,
    rank: tl.int32,
    own_row: tl.int32,
    own_rows: tl.int32,
    bias_row: tl.int32,
    bias_rows: tl.int32,
    slot_rows: tl.int32,
    peers: tl.int64,
    targets: tl.int64,
    owners: tl.int64,
    x_stride: tl.int64,
    w_deep_stride,
    w_col_stride,
    bias_stride,
    y_stride: tl.int64,
    timeout_ns: tl.int64,
    WORLD: tl.constexpr,  # noqa: N803
    TWICE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLS: tl.constexpr,  # noqa: N803
    DEEP: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
    SUM_ROWS: tl.constexpr,  # noqa: N803
    SUM_COLS: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    EDGE: tl.constexpr,  # noqa: N803
    BYTES: tl.constexpr,  # noqa: N803
    MADE: tl.constexpr,  # noqa: N803
    ON_GPU: tl.constexpr,  # noqa: N803
):
    """Store the sum over ranks of x.w (+ bias) in y.

    chunks: int32 [items, 4]: first column, end, index of the words of its products and its sums.
    places: int64 [2, copy_places], of both copies of the window: where each rank's words begin;
    where each rank keeps sums, if TWICE; where the own products' window begins; and where each
    row of the own products goes: if TWICE to its owner, else to every rank, the own one last.
    gates: int32 [4], 0 before and after: open, met (1, or 2 for never), programs that ended, 0.
    stop, status: int32. The status becomes 1 + the index of a word that was given up (data), or
    the place of one (free, entered).
    copy: of the window. own_row, own_rows: rows that this rank adds up. slot_rows: of a source.
    bias_row, bias_rows: rows whose products get the bias, unless TWICE: then sums get it.
    peers: all other ranks, as a set; targets: those that get products; owners: those that pass on.
    timeout_ns: how long a program waits before it gives up.
    MADE: whether the product of x and w stands in y already, so that nothing is multiplied.
    EDGE, BYTES: columns and bytes that divide where rows and chunks begin and end.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    workers = tl.maximum(programs - 1, 1)
    door = program == programs - 1
    first = program
    if door & (programs > 1):
        first = items
    places += copy * copy_places
    words = tl.load(places + rank).to(tl.pointer_type(tl.int32))
    kept = places + WORLD  # where ranks keep sums
    if TWICE:
        landing = tl.load(kept + WORLD)
        rows_to = kept + WORLD + 1
    else:
        landing = tl.load(kept)
        rows_to = kept + 1
    everyone = tl.arange(0, 64)
    of_peers = ((peers >> everyone) & 1) != 0
    patience_ns = timeout_ns

    opened = 0
    if door:
        opened = open_window(
            places, words, gates, stop, status, rank, peers, digest, patience_ns, WORLD, ON_GPU
        )
        if opened == 0:
            patience_ns = tl.zeros_like(patience_ns)

    for item in tl.range(first, items, workers):
        entry = chunks + item * _FIELDS
        begin = tl.multiple_of(tl.load(entry + _BEGIN), EDGE)
        end = tl.multiple_of(tl.load(entry + _END), EDGE)
        for left in tl.range(begin, end, COLS):
            for top in tl.range(0, m, ROWS):
                if MADE:
                    made_row = top + tl.arange(0, ROWS)
                    made_col = left + tl.arange(0, COLS)
                    made = (made_row < m)[:, None] & (made_col < end)[None, :]
                    made_at = y + made_row.to(tl.int64)[:, None] * y_stride + made_col[None, :]
                    total = tl.load(made_at, mask=made, other=0).to(tl.float32)
                else:
                    if ROWS == 1:
                        x_rows = x + x_stride * top
                        in_x = top < m
                    else:
                        x_row = top + tl.arange(0, ROWS)
                        x_rows = x + x_row.to(tl.int64)[:, None] * x_stride
                        in_x = (x_row < m)[:, None]
                    total = product(
                        x_rows, in_x, w, left, end, 0, k, w_deep_stride, w_col_stride,
                        ROWS, COLS, DEEP, STAGES, ON_GPU,
                    )  # fmt: skip
                if opened == 0:
                    opened = await_words(
                        words, 0, tl.zeros_like(peers), 1, gates + OPEN, stop, patience_ns,
                        True, WORLD, ON_GPU,
                    )  # fmt: skip
                row = top + tl.arange(0, ROWS)
                col = left + tl.arange(0, COLS)
                if HAS_BIAS and not TWICE:
                    with_bias = (row >= bias_row) & (row < bias_row + bias_rows)
                    terms = bias + col.to(tl.int64) * bias_stride
                    term = tl.load(terms, mask=(col < end) & (bias_rows > 0), other=0)
                    term = term.to(tl.float32)[None, :]
                    total += tl.where(with_bias[:, None], term, 0.0)
                part = total.to(y.dtype.element_ty)
                inside = (row < m)[:, None] & (col < end)[None, :] & (opened != 0)
                if TWICE:
                    tl.store(_rows_at(rows_to, row, m, y, BYTES) + col[None, :], part, inside)
                else:
                    for target in tl.static_range(WORLD):
                        at = _rows_at(rows_to + target * m, row, m, y, BYTES)
                        tl.store(at + col[None, :], part, inside)
        if opened != 0:
            raise_words(
                places, rank * _CHUNKS + tl.load(entry + _PARTIAL), targets, 1, WORLD, ON_GPU
            )
        else:
            patience_ns = tl.zeros_like(patience_ns)

    if door:
        met = meet(words, gates, stop, status, peers, digest, patience_ns, WORLD, ON_GPU)
        if met == 0:
            patience_ns = tl.zeros_like(patience_ns)

    # What this rank adds up. A product that does not come spoils its chunk.
    if own_rows > 0:
        for item in tl.range(first, items, workers):
            entry = chunks + item * _FIELDS
            begin = tl.multiple_of(tl.load(entry + _BEGIN), EDGE)
            end = tl.multiple_of(tl.load(entry + _END), EDGE)
            word = tl.load(entry + _PARTIAL)
            came = await_words(
                words + word,
                _CHUNKS,
                peers,
                1,
                gates + MET,
                stop,
                patience_ns,
                True,
                WORLD,
                ON_GPU,
            )
            heard = words + word + everyone * _CHUNKS
            tl.store(heard, tl.zeros_like(everyone), mask=of_peers & (came != 0))
            if came == 0:
                tell(status, word + 1)
                patience_ns = tl.zeros_like(patience_ns)
            for left in tl.range(begin, end, SUM_COLS):
                col = left + tl.arange(0, SUM_COLS)
                for top in tl.range(0, own_rows, SUM_ROWS):
                    row = top + tl.arange(0, SUM_ROWS)
                    inside = (row < own_rows)[:, None] & (col < end)[None, :]
                    at = tl.multiple_of(landing.to(y.dtype), BYTES)
                    at = at + row.to(tl.int64)[:, None] * n + col[None, :]
                    total = tl.zeros((SUM_ROWS, SUM_COLS), tl.float32)
                    for _ in tl.static_range(WORLD):
                        total += tl.load(at, mask=inside, other=0).to(tl.float32)
                        at += slot_rows.to(tl.int64) * n
                    if HAS_BIAS and TWICE:
                        term = tl.load(
                            bias + col.to(tl.int64) * bias_stride, mask=col < end, other=0
                        )
                        total += term.to(tl.float32)[None, :]
                    if came == 0:
                        total = tl.full((SUM_ROWS, SUM_COLS), float("nan"), tl.float32)
                    result = total.to(y.dtype.element_ty)
                    if TWICE:
                        for turn in tl.static_range(1, WORLD):
                            peer = (rank + turn) % WORLD
                            there = tl.multiple_of(tl.load(kept + peer).to(y.dtype), BYTES)
                            there = there + (own_row + row).to(tl.int64)[:, None] * n + col[None, :]
                            tl.store(there, result, inside & (opened != 0))
                    here = y + (own_row + row).to(tl.int64)[:, None] * y_stride + col[None, :]
                    tl.store(here, result, inside)
            if TWICE:  # noqa: SIM102
                if opened != 0:
                    raise_words(
                        places, rank * _CHUNKS + tl.load(entry + _SUM), peers, 1, WORLD, ON_GPU
                    )

    if TWICE:
        for item in tl.range(first, items, workers):
            entry = chunks + item * _FIELDS
            begin = tl.multiple_of(tl.load(entry + _BEGIN), EDGE)
            end = tl.multiple_of(tl.load(entry + _END), EDGE)
            word = tl.load(entry + _SUM)
            came = await_words(
                words + word, _CHUNKS, owners, 1, gates + MET, stop, patience_ns, True, WORLD,
                ON_GPU,
            )  # fmt: skip
            heard = words + word + everyone * _CHUNKS
            of_owners = ((owners >> everyone) & 1) != 0
            tl.store(heard, tl.zeros_like(everyone), mask=of_owners & (came != 0))
            if came == 0:
                tell(status, word + 1)
                patience_ns = tl.zeros_like(patience_ns)
            for left in tl.range(begin, end, SUM_COLS):
                col = left + tl.arange(0, SUM_COLS)
                for top in tl.range(0, m, SUM_ROWS):
                    row = top + tl.arange(0, SUM_ROWS)
                    others = (row < own_row) | (row >= own_row + own_rows)
                    inside = (others & (row < m))[:, None] & (col < end)[None, :]
                    at = tl.multiple_of(tl.load(kept + rank).to(y.dtype), BYTES)
                    at = at + row.to(tl.int64)[:, None] * n + col[None, :]
                    result = tl.load(at, mask=inside, other=0)
                    if came == 0:
                        result = tl.full((SUM_ROWS, SUM_COLS), float("nan"), y.dtype.element_ty)
                    here = y + row.to(tl.int64)[:, None] * y_stride + col[None, :]
                    tl.store(here, result, inside)

    if leave(gates) == programs - 1:
        give_back(places, gates, rank, peers, WORLD, ON_GPU)
