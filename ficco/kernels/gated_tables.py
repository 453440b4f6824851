"""Tables of parts, which the gated GEMM's kernels read; built once per plan.

Tiles never span parts and are processed in the order of parts. All parts of a table are of one
kind: own parts followed by window parts, which wait for their rows; or parts that raise words; or
parts that are summed with terms that peers push.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from ficco.core.errors import InputError
from ficco.kernels.arrays import Arrays, address, dtype_name, has_bulk_loads, item_bytes, library_of
from ficco.kernels.window_release import ReleaseTable
from ficco.plan.tables import Arrived, GatedPart
from ficco.program.tiling import UNSHARED, Shares, Tile, choose_tile, count_tiles, shared_tiles

_INTERPRETED_PROCESSORS = 4  # multiprocessors assumed without a GPU
_ALIGN = 16  # bytes of a bulk load's row, and of the widest store


class Signalling(NamedTuple):
    """Tables of parts that do more than wait.

    Attributes:
        terms: int32 [parts, terms, 2], see `gated_sum_kernel`; not read if no part is summed.
        counters: int32 [parts], all 0 between launches. Launches of one table must not overlap.
        term_count: terms of a summed part; 0 if no part is summed.
        own_at: number of terms before the own product.
        col_step: 0 if all parts have all columns, else a divisor of the column bounds, 1 to 16.
        partial_rows, recv_rows: minimum rows of partial and recv; 0 if not used.
        begun: whether parts accumulate into their targets.
    """

    terms: Any
    counters: Any
    term_count: int
    own_at: int
    col_step: int
    partial_rows: int
    recv_rows: int
    begun: bool


class Shared(NamedTuple):
    """The last tiles, which several programs compute together; see `split_k`.

    Attributes:
        tiles: number of split tiles.
        among: programs per split tile, 2 or more; 1 if no tile is split.
        scratch: float32, on the device: at least one tile for each of these programs.
        counts: int32 [tiles], all 0 between launches.
    """

    tiles: int
    among: int
    scratch: Any
    counts: Any


class Table(NamedTuple):
    """Parts prepared for launches; returned by `prepare`.

    Attributes:
        parts: the parts with elements, in the order of their tiles.
        n, k, dtype: columns of c, depth, and dtype of the operands.
        tile: the tile of the GEMM.
        places: the table of tiles on the device; see `tile_product`.
        own_tiles, tiles: number of tiles of own parts, and of all parts.
        programs: programs of a launch.
        bulk: whether the GPU has bulk (TMA) loads.
        arrays: the array library.
        heights: minimum rows of own, window and c.
        shared: the split tiles.
        signalling: further tables, or None if parts only wait.
        release: the words by which the launch releases the window, or None.
    """

    parts: tuple[GatedPart, ...]
    n: int
    k: int
    dtype: str
    tile: Tile
    places: Any
    own_tiles: int
    tiles: int
    programs: int
    bulk: bool
    heights: tuple[int, int, int]
    shared: Shared
    signalling: Signalling | None = None
    release: ReleaseTable | None = None
    arrays: Any = None


def prepare(  # noqa: PLR0913 - a table needs all of them
    parts: Sequence[GatedPart],
    n: int,
    k: int,
    dtype: Any,
    device: Any,
    tile: Tile | None = None,
    begun: bool = False,
    turn_of: Hashable = None,
    release: ReleaseTable | None = None,
    split: bool = True,
    leaves: int = 0,
) -> Table:
    """Return the table of parts. It must outlive the launches and their graphs.

    It copies to the device, so it must not be called while a stream waits or is captured.

    Args:
        parts: own parts are processed first, the others in this order.
        n: columns of c.
        k: depth.
        dtype: dtype of own, window and b: float32, float16 or bfloat16.
        device: an array library (`Arrays`), or a torch.device; a CPU is for the interpreter.
        tile: tile of the GEMM; by default `choose_tile` chooses it.
        begun: whether parts accumulate into their targets.
        turn_of: identifies tables whose launches never overlap, so that they share one scratch;
            None: this table has its own.
        release: the words by which the launch releases the window; parts may then only wait.
        split: whether several programs may compute a tile together.
        leaves: multiprocessors that launches leave free.

    Raises:
        InputError: a part is invalid.
    """
    for part in parts:
        _check_part(part, n)
    wide = [part._replace(cols=_cols(part, n)) for part in parts]
    order = sorted((p for p in wide if p.rows and p.cols), key=_turn)  # stable
    arrays, item = library_of(device), item_bytes(dtype)
    processors = arrays.processors or _INTERPRETED_PROCESSORS
    own = [part for part in order if part.source == "own"]
    window = [part for part in order if part.source == "window"]
    further = begun or any(_does_more(part, n) for part in order)
    _check_kind(order, bool(window), further)
    if release is not None and (further or not order):
        raise InputError("only a launch whose parts wait for the window can release it")
    split = split and not any(part.terms for part in order)
    rows, cols = [part.rows for part in order], [_cols(part, n) for part in order]
    aligned = k * item % _ALIGN == 0
    if tile is None:
        pushed = [part.signal >= 0 for part in order]
        tile = choose_tile(rows, cols, item, processors, aligned, pushed, k, split)
    firsts = [0, *accumulate(count_tiles(rows, cols, tile))]
    tiles, at_once = firsts[-1], max(processors - leaves, 1) * tile.per_sm
    shares = shared_tiles(tiles, at_once, tile, k) if split else UNSHARED
    return Table(
        parts=tuple(order),
        n=n,
        k=k,
        dtype=dtype_name(dtype),
        tile=tile,
        places=arrays.place(tile_places(order, n, tile), "int32"),
        own_tiles=firsts[len(own)],
        tiles=tiles,
        programs=max(min(tiles - shares.tiles, at_once), shares.tiles * shares.among),
        bulk=has_bulk_loads(arrays),
        heights=(
            max((part.a_row + part.rows for part in own), default=0),
            max((part.a_row + part.rows for part in window), default=0),
            max((part.c_row + part.rows for part in order if part.target == "c"), default=0),
        ),
        shared=_shared(shares, tile.rows * tile.cols, arrays, turn_of),
        signalling=_signalling(order, n, arrays, begun) if further else None,
        release=release,
        arrays=arrays,
    )


def _signalling(order: list[GatedPart], n: int, arrays: Arrays, begun: bool) -> Signalling:
    """Return the tables of parts that do more than wait.

    Raises:
        InputError: the parts cannot be in one launch.
    """
    summed = [part for part in order if part.terms]
    places = {(len(part.terms), part.terms.index(None)) for part in summed}
    if len(places) > 1:
        raise InputError(
            "summed parts of one launch need equal numbers of terms, and None in the same place; "
            f"found (terms, place) {sorted(places)}"
        )
    ranks, own_at = places.pop() if places else (1, 0)
    arrived = [[term for term in part.terms if term is not None] for part in order]
    terms = [of_part or [Arrived(0)] * (ranks - 1) for of_part in arrived]
    counters = arrays.place([0] * len(order), "int32")
    return Signalling(
        terms=arrays.place(terms, "int32") if summed else counters,
        counters=counters,
        term_count=ranks - 1,
        own_at=own_at,
        col_step=_col_step(order, n),
        partial_rows=max((p.c_row + p.rows for p in order if p.target == "partial"), default=0),
        recv_rows=max(
            (term.row + part.rows for part in summed for term in part.terms if term), default=0
        ),
        begun=begun,
    )


def _shared(shares: Shares, elements: int, arrays: Arrays, turn_of: Hashable) -> Shared:
    """Return scratch and counts of split tiles of a number of elements."""
    counts = arrays.place([0] * max(shares.tiles, 1), "int32")
    if shares.tiles:
        scratch = _scratch(shares.tiles * shares.among * elements, arrays, turn_of)
    else:
        scratch = arrays.empty(0, "float32")
    return Shared(*shares, scratch, counts)


def _scratch(elements: int, arrays: Arrays, turn_of: Hashable) -> Any:
    """Return a float32 scratch; launches that never overlap share the largest one."""
    key = (arrays.device, turn_of)
    scratch = None if turn_of is None else _scratches.get(key)
    if scratch is None or scratch.elements < elements:
        scratch = _Scratch(arrays.empty(elements, "float32"), elements)
        if turn_of is not None:
            _scratches[key] = scratch
    return scratch


class _Scratch:
    """An array that several tables share, in the form of an array argument of kernels."""

    dtype = "float32"

    def __init__(self, array: Any, elements: int) -> None:
        self.array, self.elements = array, elements

    def data_ptr(self) -> int:
        """Return the device address."""
        return address(self.array)


_scratches: WeakValueDictionary[Hashable, _Scratch] = WeakValueDictionary()


def tile_places(
    order: Sequence[GatedPart], n: int, tile: Tile
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the table of tiles; see `tile_product`.

    The tiles of a part are visited in groups of `tile.group` rows of tiles, column by column.
    """
    tables = []
    for number, part in enumerate(order):
        down, across = -(-part.rows // tile.rows), -(-_cols(part, n) // tile.cols)
        at = np.arange(down * across)
        top = at // (tile.group * across) * tile.group
        height = np.minimum(down - top, tile.group)
        row = (top + (at - top * across) % height) * tile.rows
        col = (at - top * across) // height * tile.cols
        end = part.col + _cols(part, n)
        away = part.target == "partial"
        rest = (end, number, part.word, part.signal, len(at), away, row)
        columns = (part.a_row + row, part.c_row + row, part.rows - row, part.col + col, *rest)
        tables.append(np.stack([np.broadcast_to(column, at.shape) for column in columns], axis=1))
    tables.append(np.array([[0, 0, 0, 0, 0, len(order), -1, -1, 0, 0, 0]]))
    return np.concatenate(tables).astype(np.int32)


def _check_kind(order: list[GatedPart], window: bool, further: bool) -> None:
    """Raise an error if no single kernel supports all parts."""
    summed = [part for part in order if part.terms]
    if (window and further) or (summed and len(summed) < len(order)):
        raise InputError(
            "parts of one launch must all wait for their rows, or all be summed with pushed terms, "
            "or neither; make one table per kind"
        )


def _does_more(part: GatedPart, n: int) -> bool:
    """Return whether a part needs more than a wait and a multiplication."""
    whole = part.col == 0 and part.cols == n
    return part.signal >= 0 or part.target != "c" or not whole or bool(part.terms)


def _turn(part: GatedPart) -> bool:
    """Return the sort key of a part: own parts come first."""
    return part.source != "own"


def _cols(part: GatedPart, n: int) -> int:
    return n - part.col if part.cols is None else part.cols


def _col_step(order: list[GatedPart], n: int) -> int:
    """Return the largest power of two, at most 16, that divides all bounds of columns."""
    if all(part.col == 0 and part.cols == n for part in order):
        return 0
    bits = _ALIGN
    for part in order:
        bits |= part.col | _cols(part, n)
    return bits & -bits


def _check_part(part: GatedPart, n: int) -> None:
    if part.source not in ("own", "window"):
        raise InputError(f"{part}: a part's source is 'own' or 'window'")
    if part.target not in ("c", "partial"):
        raise InputError(f"{part}: a part's target is 'c' or 'partial'")
    if part.source == "own" and part.word >= 0:
        raise InputError(f"{part}: own rows exist before the launch; leave the word at -1")
    if min(part.a_row, part.c_row, part.rows) < 0 or min(part.word, part.signal) < -1:
        raise InputError(f"{part}: rows count from 0, and words are an index or -1")
    if part.col < 0 or _cols(part, n) < 0 or part.col + _cols(part, n) > n:
        raise InputError(f"{part}: its columns are outside 0 to {n}")
    if not part.terms:
        return
    if part.source != "own" or part.target != "c":
        raise InputError(f"{part}: a summed part must have source 'own' and target 'c'")
    if part.terms.count(None) != 1:
        raise InputError(f"{part}: terms must hold None once, in the place of the own product")
    if any(term.row < 0 or term.word < -1 for term in part.terms if term is not None):
        raise InputError(f"{part}: rows count from 0, and words are an index or -1")
