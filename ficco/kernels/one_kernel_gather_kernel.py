"""The one-kernel gather's device code: a whole all_gather_matmul of one rank in one launch.

The first program of a launch is the door. The others divide the tiles of all outputs. The first few
programs, including the door, store the slices of the own shard at peers:

    program   prefetch its first weights
              store: slices of the own shard, at all peers; raise       (after the first gate)
              wait for all slices of the peers; multiply its tiles      (after the second gate)
    door      wait for free, clear it | open the gate, enter | store | wait for entered

A tile has all rows, or as many as fit. Own rows are read from the user's matrix. If tiles are few,
several programs compute a tile by split-k, and the last of them sums the parts in their order. If
the gathered x is kept, the programs with tiles copy it row by row. A single program does all of
this. The last program to end clears the words that peers raised, and raises free. No program waits
for peers before the own shard is sent, or for other programs of its rank except for the door at the
gates. GPUs start programs in the order of their numbers (see `one_kernel_all_reduce_kernel`). So a
launch ends if other kernels leave multiprocessors for the storing programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import GATHER
from ficco.kernels.one_kernel_handshake import (
    MET,
    OPEN,
    give_back,
    leave,
    meet,
    open_window,
    tell,
)
from ficco.kernels.one_kernel_product import product
from ficco.kernels.signals import await_all_words, await_words, raise_words
from ficco.kernels.tuple_arguments import unpacked
from ficco.plan import SIGNALS
from ficco.plan.tables import GATES

__all__ = ["one_kernel_gather_gemm"]

_CHUNKS = tl.constexpr(SIGNALS["data"])  # words of one writer
_COUNTS = tl.constexpr(GATES)  # index of the first count of tiles, after the gates
_LINE = tl.constexpr(128)  # bytes of one prefetch
_AHEAD = tl.constexpr(131_072)  # bytes of weights that a program prefetches before it waits
_NEVER = tl.constexpr(1 << 30)


@triton.jit
def _ask_for(  # noqa: PLR0913 - a kernel's arguments are its interface
    w,
    left,
    right,
    begin,
    end,
    deep_stride,
    col_stride,
    COLS: tl.constexpr,
    TURNED: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Prefetch the first weights of a tile into L2, without a wait."""
    if ON_GPU:
        item: tl.constexpr = w.dtype.element_ty.primitive_bitwidth // 8
        long: tl.constexpr = _LINE // item
        most = tl.minimum(end, begin + _AHEAD // (COLS * item))
        if TURNED == 1:  # elements of a column are adjacent
            col = tl.minimum(left + tl.arange(0, COLS), right - 1)
            line = tl.arange(0, 16) * long
            for at in tl.range(begin, most, 16 * long):
                deep = tl.minimum(at + line, end - 1)
                _prefetch(w + col.to(tl.int64)[:, None] * col_stride + deep[None, :])
        else:
            lines: tl.constexpr = (COLS + long - 1) // long
            col = tl.minimum(left + tl.arange(0, lines) * long, right - 1).to(tl.int64)
            if TURNED != 0:
                col = col * col_stride
            for at in tl.range(begin, most, 256):
                deep = tl.minimum(at + tl.arange(0, 256), end - 1)
                _prefetch(w + col[:, None] + deep.to(tl.int64)[None, :] * deep_stride)


@triton.jit
def _prefetch(at):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _place_of(
    unit,
    splits,
    m,
    k,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEEP: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Return the number, first row and column of a unit's tile, its part, and the part's depths."""
    tile = unit // splits
    part = unit % splits
    high = tl.cdiv(m, ROWS)
    deep = tl.cdiv(tl.cdiv(k, DEEP), splits) * DEEP
    begin = tl.multiple_of(tl.minimum(part * deep, tl.cdiv(k, DEEP) * DEEP), DEEP)
    end = tl.multiple_of(tl.minimum(begin + deep, k), EDGE)
    return tile, tile % high * ROWS, tile // high * COLS, part, begin, end


@triton.jit
def _rows_of(  # noqa: PLR0913
    x,
    gathered,
    top,
    k,
    x_stride,
    own_row,
    own_rows,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Return pointers to rows of x: peers' rows in the window, own rows in the user's matrix."""
    item: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    row = top
    if ROWS > 1:
        row = top + tl.arange(0, ROWS)
    there = gathered + row.to(tl.int64) * k * item
    here = x.to(tl.int64) + (row - own_row).to(tl.int64) * x_stride * item
    mine = (row >= own_row) & (row < own_row + own_rows)
    at = tl.multiple_of(tl.where(mine, here, there).to(x.dtype), BYTES)
    if ROWS > 1:
        at = at[:, None]
    return at


@triton.jit
def _make(  # noqa: PLR0913 - a kernel's arguments are its interface
    x,
    w,
    bias,
    y,
    gathered,
    gates,
    parts,
    unit,
    base,
    came,
    splits,
    m,
    n,
    k,
    own_row,
    own_rows,
    x_stride,
    w_deep_stride,
    w_col_stride,
    has_bias,
    y_stride,
    SPLIT: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEEP: tl.constexpr,
    STAGES: tl.constexpr,
    EDGE: tl.constexpr,
    BYTES: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Compute a tile of an output, or a part of a tile; the last part also completes the tile."""
    tile, top, left, part, begin, end = _place_of(unit - base, splits, m, k, ROWS, COLS, DEEP, EDGE)
    rows = _rows_of(x, gathered, top, k, x_stride, own_row, own_rows, ROWS, BYTES)
    row = top + tl.arange(0, ROWS)
    col = left + tl.arange(0, COLS)
    total = product(
        rows, (row < m)[:, None], w, left, n, begin, end, w_deep_stride, w_col_stride,
        TURNED, ROWS, COLS, DEEP, STAGES, ON_GPU,
    )  # fmt: skip
    if came == 0:
        total = tl.full((ROWS, COLS), float("nan"), tl.float32)
    complete = tl.full((), 1, tl.int32)
    if SPLIT:
        inner = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
        mine = parts + unit * (ROWS * COLS) + inner
        tl.store(mine, total, cache_modifier=".cg")
        tl.debug_barrier()
        count = gates + _COUNTS + base // splits + tile
        made = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu")
        complete = (made == splits - 1).to(tl.int32)
        if made == splits - 1:
            tl.atomic_xchg(count, 0, sem="relaxed", scope="gpu")
            total = tl.zeros((ROWS, COLS), tl.float32)
            first = parts + (unit - part) * (ROWS * COLS) + inner
            for other in tl.range(0, splits):
                total += tl.load(first + other * (ROWS * COLS), cache_modifier=".cg")
    if complete == 1:
        term = tl.load(bias + col, mask=(col < n) & (has_bias != 0), other=0)
        total += term.to(tl.float32)[None, :]
        at = y + row.to(tl.int64)[:, None] * y_stride + col[None, :]
        tl.store(at, total.to(y.dtype.element_ty), (row < m)[:, None] & (col < n)[None, :])


@triton.jit
def _keep_row(  # noqa: PLR0913
    x,
    gathered,
    kept,
    row,
    came,
    k,
    own_row,
    own_rows,
    x_stride,
    kept_stride,
    WIDE: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Copy a row of x to the kept output."""
    row = tl.full((), row, tl.int32)  # the interpreter's loops count in plain numbers
    here = _rows_of(x, gathered, row, k, x_stride, own_row, own_rows, 1, BYTES)
    there = kept + row.to(tl.int64) * kept_stride
    for left in tl.range(0, k, WIDE):
        col = left + tl.arange(0, WIDE)
        piece = tl.load(here + col, mask=col < k, other=0)
        if came == 0:
            piece = tl.full((WIDE,), float("nan"), tl.float32).to(piece.dtype)
        tl.store(there + col, piece, mask=col < k)


@triton.jit(do_not_specialize=GATHER.unknown)
def one_kernel_gather_gemm(  # noqa: PLR0912, PLR0913, PLR0915
    x,
    w,
    bias,
    y,
    kept,
    places,
    gates,
    parts,
    stop,
    status,
    digest: tl.int32,
    copy: tl.int32,
    plan,
    k: tl.int32,
    rank: tl.int32,
    sets,
    n,
    x_stride: tl.int64,
    kept_stride: tl.int64,
    w_deep_strides,
    w_col_strides,
    y_strides,
    timeout_ns: tl.int64,
    WORLD: tl.constexpr,
    TURNED: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEEP: tl.constexpr,
    STAGES: tl.constexpr,
    PUSH_ROWS: tl.constexpr,
    PUSH_COLS: tl.constexpr,
    EDGE: tl.constexpr,
    BYTES: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Store in every y the product of all ranks' x and a w (+ bias), and x in kept, if keeps.

    w, bias, y, their columns n and strides: tuples, an element for each output. TURNED: which
    elements of each w are adjacent (see `one_kernel_product`), two bits per output.
    places: int64 [2, copy_places], addresses of both copies of the window: each rank's words, and
    each rank's window of all ranks' x.
    gates: int32, of the handshake, and a count per tile; all 0 before and after.
    parts: float32 [units, ROWS, COLS], for parts of tiles, if SPLIT.
    stop, status: int32. The status becomes 1 + the place of a word that did not arrive.
    copy: of the window.
    plan: slices: number of slices of a shard with rows, `width` columns each; stored: the same of
    the own shard, 0 without rows. own_row, own_rows: rows of the own shard among all m rows.
    splits: parts of a tile. storing: programs that store at peers. biases: outputs with a bias, as
    bits. keeps: 0 if kept is not written.
    sets: all other ranks, and those whose shards have rows.
    timeout_ns: time limit of a program's wait.
    EDGE, BYTES: elements of x and bytes that divide the bounds of rows and slices.
    """
    (
        copy_places, slices, stored, width, m, own_row, own_rows, splits, storing, biases, keeps
    ) = unpacked(plan, tl.int32)  # fmt: skip
    peers, sources = unpacked(sets, tl.int64)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    workers = tl.maximum(programs - 1, 1)
    door = program == 0
    places += copy * copy_places
    words = tl.load(places + rank).to(tl.pointer_type(tl.int32))
    windows = places + WORLD
    gathered = tl.load(windows + rank)
    patience_ns = timeout_ns
    high = tl.cdiv(m, ROWS) * splits
    units = 0
    for number in tl.static_range(len(w)):
        units += tl.cdiv(n[number], COLS) * high
    first = tl.maximum(program - 1, 0)
    if door & (programs > 1):
        first = units

    # Weights depend on no peer: the first are loaded while the shards are in transit.
    base = 0
    for number in tl.static_range(len(w)):
        past = base + tl.cdiv(n[number], COLS) * high
        if (first >= base) & (first < past):
            _, _, left, _, begin, end = _place_of(
                first - base, splits, m, k, ROWS, COLS, DEEP, EDGE
            )
            _ask_for(
                w[number], left, n[number], begin, end, w_deep_strides[number],
                w_col_strides[number], COLS, (TURNED >> (2 * number)) & 3, ON_GPU,
            )  # fmt: skip
        base = past

    opened = 0
    if door:
        opened = open_window(
            places, words, gates, stop, status, rank, peers, digest, patience_ns, WORLD, ON_GPU
        )
        if opened == 0:
            patience_ns = tl.zeros_like(patience_ns)

    begun = program
    if program >= storing:
        begun = stored
    for item in tl.range(begun, stored, storing):
        begin = tl.multiple_of(item * width, EDGE)
        end = tl.multiple_of(tl.minimum(begin + width, k), EDGE)
        for top in tl.range(0, own_rows, PUSH_ROWS):
            row = top + tl.arange(0, PUSH_ROWS)
            for left in tl.range(begin, end, PUSH_COLS):
                col = tl.multiple_of(left, EDGE) + tl.arange(0, PUSH_COLS)
                inside = (row < own_rows)[:, None] & (col < end)[None, :]
                here = x + row.to(tl.int64)[:, None] * x_stride + col[None, :]
                piece = tl.load(here, mask=inside, other=0)
                if opened == 0:
                    opened = await_words(
                        words, 0, tl.zeros_like(peers), 1, gates + OPEN, stop, patience_ns,
                        True, WORLD, ON_GPU,
                    )  # fmt: skip
                for turn in tl.static_range(1, WORLD):
                    peer = (rank + turn) % WORLD
                    window = tl.multiple_of(tl.load(windows + peer).to(x.dtype), BYTES)
                    there = window + (own_row + row).to(tl.int64)[:, None] * k + col[None, :]
                    tl.store(there, piece, inside & (opened != 0))
        if opened != 0:
            raise_words(places, rank * _CHUNKS + item, peers, 1, WORLD, ON_GPU)
        else:
            patience_ns = tl.zeros_like(patience_ns)

    if door:
        met = meet(words, gates, stop, status, peers, digest, patience_ns, WORLD, ON_GPU)
        if met == 0:
            patience_ns = tl.zeros_like(patience_ns)

    everyone = tl.arange(0, 64)
    of_sources = ((sources >> everyone) & 1) != 0
    came = 1
    awaits = (first < units) | (door & (units == 0))  # at least one: the words are cleared later
    if awaits:
        came = await_all_words(
            words, _CHUNKS, slices, sources, 1, gates + MET, stop, patience_ns, WORLD, ON_GPU
        )
        if came == 0:
            for item in tl.range(0, slices):
                place = everyone * _CHUNKS + item
                seen = tl.load(words + place, mask=of_sources, other=1, volatile=True)
                missed = tl.min(tl.where(seen == 1, _NEVER, place))
                if missed < _NEVER:
                    tell(status, missed + 1)

    base = 0
    for number in tl.static_range(len(w)):
        past = base + tl.cdiv(n[number], COLS) * high
        skipped = tl.cdiv(tl.maximum(base - first, 0), workers) * workers
        for unit in tl.range(first + skipped, past, workers):
            _make(
                x, w[number], bias[number], y[number], gathered, gates, parts, unit, base, came,
                splits, m, n[number], k, own_row, own_rows, x_stride, w_deep_strides[number],
                w_col_strides[number], (biases >> number) & 1, y_strides[number], SPLIT,
                (TURNED >> (2 * number)) & 3, ROWS, COLS, DEEP, STAGES, EDGE, BYTES, ON_GPU,
            )  # fmt: skip
        base = past

    keepers = tl.maximum(tl.minimum(units, workers), 1)
    for row in tl.range(first, tl.where(awaits & (keeps != 0), m, 0), keepers):
        _keep_row(
            x, gathered, kept, row, came, k, own_row, own_rows, x_stride, kept_stride,
            PUSH_COLS, BYTES,
        )  # fmt: skip

    # The last program to end releases the window: all programs have finished reading it.
    if leave(gates) == programs - 1:
        for item in tl.range(0, slices):
            heard = words + everyone * _CHUNKS + item
            tl.store(heard, tl.zeros_like(everyone), mask=of_sources)
        give_back(places, gates, rank, peers, WORLD, ON_GPU)
