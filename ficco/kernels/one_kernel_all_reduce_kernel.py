"""The one-kernel all-reduce's device code: a whole matmul_all_reduce of one rank in one launch.

The first program of a launch is the door. The other programs divide the chunks, which are slices of
columns. Each takes its chunks through all stages:

    door      enter
    program   make: multiply, or read a library's product from y; store at the owners (own rows
              then stay in y)
              take: read the other ranks' products
              wait for `entered`
              finish: sum, store and, as an owner, pass on
              collect: read the owners' sums, move them into y

A single program does both. No program waits before it has computed all its products. A program
waits for no other program of its rank, and at a peer only for the door and for the program of its
own number (peers' GPUs have equally many multiprocessors). GPUs start programs in the order of
their numbers; this is not guaranteed, but tests rely on it. So a launch ends on any number of free
multiprocessors, even beside kernels that wait for a peer's kernel which waits for this call there
(NCCL's).

Data are their own signals: a vacant mailbox element holds a value that no rank sends
(`ficco.kernels.mailbox`). Any other value has arrived, and the reader stores the vacant value
again. A separate signal word would have to wait for the data's arrival, and be waited for. Loops
must be neither flattened nor warp-specialized: loads would move ahead of waits.
"""

from __future__ import annotations

from typing import Any  # noqa: F401 - of a comment; Triton reads no annotation

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ficco.kernels.declarations import ALL_REDUCE
from ficco.kernels.mailbox import (
    call_number,
    count_call,
    draw,
    enter,
    give_up,
    is_open,
    look,
    meet_all,
    sendable,
    take,
)
from ficco.kernels.one_kernel_product import product
from ficco.kernels.tuple_arguments import unpacked
from ficco.plan import SIGNALS

__all__ = ["one_kernel_all_reduce_gemm"]

_CHUNKS = tl.constexpr(SIGNALS["data"])  # words of one writer

# Fields of a chunk.
_BEGIN, _END, _PARTIAL, _SUM = (tl.constexpr(i) for i in range(4))
_FIELDS = tl.constexpr(4)


@triton.jit
def _rows_at(addresses, row, inside, bits, BYTES: tl.constexpr):
    """Return pointers to rows, from a table of their addresses."""
    at = tl.load(addresses + row, mask=inside, other=0).to(tl.pointer_type(bits.dtype))
    return tl.multiple_of(at, BYTES)[:, None]


@triton.jit(do_not_specialize=ALL_REDUCE.unknown)
def one_kernel_all_reduce_gemm(  # noqa: PLR0912, PLR0913, PLR0915
    x,
    w,
    bias,
    y,
    chunks,
    places,
    counts,
    stop,
    status,
    digest: tl.int32,
    n: tl.int32,
    k: tl.int32,
    rank: tl.int32,
    plan,
    sets,
    x_stride: tl.int64,
    w_deep_stride: tl.int64,
    w_col_stride: tl.int64,
    has_bias: tl.int32,
    y_stride: tl.int64,
    timeout_ns: tl.int64,
    WORLD: tl.constexpr,
    TWICE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEEP: tl.constexpr,
    STAGES: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    SUM_COLS: tl.constexpr,
    TURNED: tl.constexpr,
    EDGE: tl.constexpr,
    BYTES: tl.constexpr,
    MADE: tl.constexpr,
    CHAINED: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Store the sum over ranks of x.w (+ bias) in y.

    chunks: int32 [items, 4]: first column, end, index of the words of its products and its sums.
    places: int64 [2, copy_places], addresses of both copies of the mailbox: each rank's words; each
    rank's sums, if TWICE; the own mailbox of products; and the target of each row of the own
    products: if TWICE at its owner, else at every rank, the own one last.
    counts: int32 [3], of the mailbox; see `ficco.kernels.mailbox`.
    stop, status: int32. The status becomes 1 + the place of a word that did not arrive.
    bias: one row of adjacent elements; it is not read if has_bias is 0.
    plan: items: number of chunks; m: rows. own_row, own_rows: rows that this rank sums. bias_row,
    bias_rows: rows whose products get the bias; if TWICE, the sums get it instead. slot_rows: rows
    of one source.
    TURNED: which elements of w are adjacent, see `one_kernel_product`.
    sets: all other ranks, and those that pass sums.
    timeout_ns: time limit of a program's wait.
    MADE: whether y already holds the product of x and w, so that nothing is multiplied.
    CHAINED: whether the launch may begin before the previous one has ended, and then waits for that
    end. No program lets the next launch begin before it has ended itself: programs of the next
    launch would take room that peers' other kernels may need, and, after some programs have ended,
    two places on one multiprocessor.
    EDGE, BYTES: columns and bytes that divide the bounds of rows and chunks.
    """
    if CHAINED:  # before anything is read or written
        gdc_wait()
    copy_places, items, m, own_row, own_rows, bias_row, bias_rows, slot_rows = unpacked(
        plan, tl.int32
    )
    peers, owners = unpacked(sets, tl.int64)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    workers = tl.maximum(programs - 1, 1)
    door = program == 0
    first = tl.maximum(program - 1, 0)
    if door & (programs > 1):
        first = items
    number = call_number(counts)
    places += (number & 1) * copy_places
    words = tl.load(places + rank).to(tl.pointer_type(tl.int32))
    kept = places + WORLD  # addresses of the ranks' sums
    if TWICE:
        recv = tl.load(kept + WORLD)
        rows_to = kept + WORLD + 1
    else:
        recv = tl.load(kept)
        rows_to = kept + 1
    patience_ns = timeout_ns
    opened = is_open(counts, number)
    if door:  # noqa: SIM102 - other programs do not wait for `opened` here
        if opened:
            enter(places, rank, peers, digest, number, WORLD, ON_GPU)

    sent_rows = m
    if MADE:
        sent_rows = m - own_rows
    for item in tl.range(first, items, workers):
        entry = chunks + item * _FIELDS
        begin = tl.multiple_of(tl.load(entry + _BEGIN), EDGE)
        end = tl.multiple_of(tl.load(entry + _END), EDGE)
        for left in tl.range(begin, end, COLS):
            for top in tl.range(0, sent_rows, ROWS):
                # Start with the rows after the own ones, so that not all ranks store at one rank.
                first_row = top + own_row + own_rows
                row = first_row + tl.arange(0, ROWS)
                row = tl.where(row < m, row, row - m)
                in_m = top + tl.arange(0, ROWS) < sent_rows
                col = left + tl.arange(0, COLS)
                if MADE:
                    made_at = y + row.to(tl.int64)[:, None] * y_stride + col[None, :]
                    made = in_m[:, None] & (col < end)[None, :]
                    total = tl.load(made_at, mask=made, other=0).to(tl.float32)
                else:
                    if ROWS == 1:
                        x_rows = x + x_stride * tl.where(first_row < m, first_row, first_row - m)
                        in_x = top < m
                    else:
                        x_rows = x + row.to(tl.int64)[:, None] * x_stride
                        in_x = in_m[:, None]
                    total = product(
                        x_rows, in_x, w, left, end, 0, k, w_deep_stride, w_col_stride,
                        TURNED, ROWS, COLS, DEEP, STAGES, ON_GPU,
                    )  # fmt: skip
                if not TWICE:
                    with_bias = (row >= bias_row) & (row < bias_row + bias_rows)
                    added = (col < end) & (bias_rows > 0) & (has_bias != 0)
                    term = tl.load(bias + col, mask=added, other=0).to(tl.float32)[None, :]
                    total += tl.where(with_bias[:, None], term, 0.0)
                part = sendable(total.to(y.dtype.element_ty))
                inside = in_m[:, None] & (col < end)[None, :] & opened
                if TWICE:
                    tl.store(_rows_at(rows_to, row, in_m, part, BYTES) + col[None, :], part, inside)
                else:
                    for target in tl.static_range(WORLD):
                        at = _rows_at(rows_to + target * m, row, in_m, part, BYTES)
                        tl.store(at + col[None, :], part, inside)

    drawn = draw(counts, number, ON_GPU)
    if opened == 0:
        patience_ns = tl.zeros_like(patience_ns)
    # Addresses of the sums of the next rank, and so on; this rank's last.
    sums_at = ()  # type: Any
    if TWICE:
        for turn in tl.static_range(1, WORLD + 1):
            sums_at = sums_at + (tl.load(kept + (rank + turn) % WORLD),)  # noqa: RUF005 - Triton's way
    seen = look(words, peers, digest, number, ON_GPU)
    met = tl.full((), 0, tl.int32)  # 1 once all peers have entered, 2 if one has not

    # The sums of this rank. A missing product makes its own sums NaN; a peer that has not entered
    # this call makes all results NaN.
    if own_rows > 0:
        for item in tl.range(first, items, workers):
            entry = chunks + item * _FIELDS
            begin = tl.multiple_of(tl.load(entry + _BEGIN), EDGE)
            end = tl.multiple_of(tl.load(entry + _END), EDGE)
            for left in tl.range(begin, end, SUM_COLS):
                col = left + tl.arange(0, SUM_COLS)
                for top in tl.range(0, own_rows, SUM_ROWS):
                    row = top + tl.arange(0, SUM_ROWS)
                    inside = (row < own_rows)[:, None] & (col < end)[None, :] & opened
                    at = tl.multiple_of(recv.to(y.dtype), BYTES)
                    at = at + row.to(tl.int64)[:, None] * n + col[None, :]
                    here = y + (own_row + row).to(tl.int64)[:, None] * y_stride + col[None, :]
                    mine = 0.0
                    if MADE:
                        mine = tl.load(here, mask=inside, other=0).to(tl.float32)
                    total, late = take(
                        at, slot_rows.to(tl.int64) * n, inside, stop, patience_ns,
                        rank, mine, WORLD, MADE, ON_GPU,
                    )  # fmt: skip
                    if TWICE:
                        added = (col < end) & (has_bias != 0)
                        term = tl.load(bias + col, mask=added, other=0)
                        total += term.to(tl.float32)[None, :]
                    if late >= 0:
                        patience_ns = tl.zeros_like(patience_ns)
                    if met == 0:
                        met = meet_all(
                            seen, words, counts, stop, status, peers, digest, number, patience_ns,
                            WORLD, ON_GPU,
                        )  # fmt: skip
                    if late >= 0:
                        word = late * _CHUNKS + tl.load(entry + _PARTIAL)
                        give_up(counts, number, status, word + 1)
                    if (late >= 0) | (met == 2) | (opened == 0):
                        patience_ns = tl.zeros_like(patience_ns)
                        total = tl.full((SUM_ROWS, SUM_COLS), float("nan"), tl.float32)
                    result = total.to(y.dtype.element_ty)
                    if TWICE:
                        sums = sendable(result)
                        for turn in tl.static_range(1, WORLD):
                            there = sums_at[turn - 1].to(tl.pointer_type(sums.dtype))
                            there = tl.multiple_of(there, BYTES)
                            there = there + (own_row + row).to(tl.int64)[:, None] * n + col[None, :]
                            tl.store(there, sums, inside)
                        result = sums.to(y.dtype.element_ty, bitcast=True)  # equal on all ranks
                    tl.store(here, result, (row < own_rows)[:, None] & (col < end)[None, :])

    if met == 0:
        met = meet_all(
            seen, words, counts, stop, status, peers, digest, number, patience_ns,
            WORLD, ON_GPU,
        )  # fmt: skip
    count_call(counts, number, programs, drawn)
    nan_filled = (met == 2) | (opened == 0)
    if nan_filled:
        patience_ns = tl.zeros_like(patience_ns)
    if TWICE:
        everyone = tl.arange(0, 64)
        passing = tl.min(tl.where(((owners >> everyone) & 1) != 0, everyone, 64))
        for item in tl.range(first, items, workers):
            entry = chunks + item * _FIELDS
            begin = tl.multiple_of(tl.load(entry + _BEGIN), EDGE)
            end = tl.multiple_of(tl.load(entry + _END), EDGE)
            for left in tl.range(begin, end, SUM_COLS):
                col = left + tl.arange(0, SUM_COLS)
                for top in tl.range(0, m, SUM_ROWS):
                    row = top + tl.arange(0, SUM_ROWS)
                    others = (row < own_row) | (row >= own_row + own_rows)
                    wanted = (others & (row < m))[:, None] & (col < end)[None, :]
                    inside = wanted & opened
                    at = tl.multiple_of(sums_at[WORLD - 1].to(y.dtype), BYTES)
                    at = at + row.to(tl.int64)[:, None] * n + col[None, :]
                    total, late = take(at, 0, inside, stop, patience_ns, 0, 0.0, 1, False, ON_GPU)
                    if late >= 0:
                        word = passing * _CHUNKS + tl.load(entry + _SUM)
                        give_up(counts, number, status, word + 1)
                        patience_ns = tl.zeros_like(patience_ns)
                    if (late >= 0) | nan_filled:
                        total = tl.full((SUM_ROWS, SUM_COLS), float("nan"), tl.float32)
                    here = y + row.to(tl.int64)[:, None] * y_stride + col[None, :]
                    tl.store(here, total.to(y.dtype.element_ty), wanted)
