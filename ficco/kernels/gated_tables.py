"""Tables of parts: what the gated GEMM's kernels read, made once per plan.

Tiles never straddle parts and are taken in the order of parts. Parts of a table are of one kind:
own ones, and then those of the window, which wait for their rows; or such that raise words; or such
that are summed with what peers push.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from ficco.errors import InputError
from ficco.kernels.arrays import Arrays, address, dtype_name, has_bulk_loads, item_bytes, library_of
from ficco.kernels.gated_parts import Arrived, GatedPart
from ficco.kernels.tiling import Shares, Tile, choose_tile, count_tiles, shared_tiles
from ficco.kernels.window_release import ReleaseTable

__all__ = ["Shared", "Signalling", "Table", "prepare"]

_INTERPRETED_PROCESSORS = 4  # where there is no GPU to ask
_ALIGN = 16  # bytes of a bulk load's row, and of the widest store


class Signalling(NamedTuple):
    """What the kernel reads of parts that do more than wait.

    Attributes:
        terms: int32 [parts, terms, 2], see `summing_kernel`; not read where no part is summed.
        counters: int32 [parts], all 0 between launches. Launches of one table must not overlap.
        term_count: terms of a summed part; 0 if no part is summed.
        own_at: how many of them come before the own product.
        col_step: 0 if all parts have all columns, else what divides columns' bounds, 1 to 16.
        partial_rows, landing_rows: rows that partial and landing have at least; 0 if not used.
        begun: whether parts are added to what their targets hold.
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
    """The last tiles, which several programs make together; see `sharing`.

    Attributes:
        tiles: how many.
        among: programs that share each, 2 or more; 1 where no tile is shared.
        scratch: float32, on the device: a tile for each of these programs, or more.
        counts: int32 [tiles], all 0 between launches.
    """

    tiles: int
    among: int
    scratch: Any
    counts: Any


class Table(NamedTuple):
    """Parts, prepared for launches; made by `prepare`.

    Attributes:
        parts: those with elements, in the order in which their tiles are taken.
        n, k, dtype: columns of c, depth, and what the operands hold.
        tile: how the GEMM is cut.
        places: what a kernel reads of the tiles, on the device; see `tile_product`.
        own_tiles, tiles: tiles of own parts, and of all.
        programs: of a launch.
        bulk: whether the GPU has bulk (TMA) loads.
        arrays: the library of the arrays.
        heights: rows that own, window and c have at least.
        shared: the last tiles.
        signalling: what else the kernel reads, or None where parts do nothing but wait.
        release: the words by which it gives the window back, or None.
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


def prepare(  # noqa: PLR0913 - a table has as many facts
    parts: Sequence[GatedPart],
    n: int,
    k: int,
    dtype: Any,
    device: Any,
    tile: Tile | None = None,
    begun: bool = False,
    turn_of: Hashable = None,
    release: ReleaseTable | None = None,
) -> Table:
    """Return the table of parts. It must outlive the launches, and graphs of them.

    Copies to the device, so not while a stream waits or is captured.

    Args:
        parts: own ones are taken first, else tiles are taken in this order.
        n: columns of c.
        k: depth.
        dtype: of own, window and b: float32, float16 or bfloat16.
        device: a library of arrays (`Arrays`), or a torch.device; the CPU's is for the interpreter.
        tile: how to cut the GEMM; by default `choose_tile` says.
        begun: whether parts are added to what their targets hold.
        turn_of: whose launches never overlap, so that one scratch will do for them; None: this
            table has its own.
        release: the words by which the launch gives the window back; parts wait, and do no more.

    Raises:
        InputError: a part that cannot be.
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
        raise InputError("only a launch whose parts wait for the window gives it back")
    # Tiles that are shared are of one source, and not summed.
    apart = None if any(part.terms for part in order) else len(own) if window else 0
    rows, cols = [part.rows for part in order], [_cols(part, n) for part in order]
    aligned = k * item % _ALIGN == 0
    if tile is None:
        pushed = [part.signal >= 0 for part in order]
        tile = choose_tile(rows, cols, item, processors, aligned, pushed, k, apart)
    firsts = [0, *accumulate(count_tiles(rows, cols, tile))]
    tiles, at_once = firsts[-1], processors * tile.per_sm
    shares = shared_tiles(tiles, 0 if apart is None else tiles - firsts[apart], at_once, tile, k)
    return Table(
        parts=tuple(order),
        n=n,
        k=k,
        dtype=dtype_name(dtype),
        tile=tile,
        places=arrays.place(_places(order, n, tile), "int32"),
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
        InputError: parts that cannot be in one launch.
    """
    summed = [part for part in order if part.terms]
    places = {(len(part.terms), part.terms.index(None)) for part in summed}
    if len(places) > 1:
        raise InputError(
            "summed parts of one launch have as many terms, and None in the same place; found "
            f"(terms, place) {sorted(places)}"
        )
    ranks, own_at = places.pop() if places else (1, 0)
    arrived = [[term for term in part.terms if term is not None] for part in order]
    terms = [found or [Arrived(0)] * (ranks - 1) for found in arrived]
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
    """Return what programs need that share tiles of so many elements."""
    counts = arrays.place([0] * max(shares.tiles, 1), "int32")
    if shares.tiles:
        scratch = _scratch(shares.tiles * shares.among * elements, arrays, turn_of)
    else:
        scratch = arrays.empty(0, "float32")
    return Shared(*shares, scratch, counts)


def _scratch(elements: int, arrays: Arrays, turn_of: Hashable) -> Any:
    """Return float32 elements, of which launches in turn share the largest."""
    key = (arrays.device, turn_of)
    found = None if turn_of is None else _scratches.get(key)
    if found is None or found.elements < elements:
        found = _Scratch(arrays.empty(elements, "float32"), elements)
        if turn_of is not None:
            _scratches[key] = found
    return found


class _Scratch:
    """An array that several tables share, in the form in which kernels take arrays."""

    dtype = "float32"

    def __init__(self, array: Any, elements: int) -> None:
        self.array, self.elements = array, elements

    def data_ptr(self) -> int:
        """Return the address as the device sees it."""
        return address(self.array)


_scratches: WeakValueDictionary[Hashable, _Scratch] = WeakValueDictionary()


def _places(order: list[GatedPart], n: int, tile: Tile) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return where every tile lies; see `tile_product`.

    Tiles of a part are visited by `tile.group` rows of them, column by column.
    """
    found = []
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
        found.append(np.stack([np.broadcast_to(column, at.shape) for column in columns], axis=1))
    found.append(np.array([[0, 0, 0, 0, 0, len(order), -1, -1, 0, 0, 0]]))
    return np.concatenate(found).astype(np.int32)


def _check_kind(order: list[GatedPart], window: bool, further: bool) -> None:
    """Refuse parts of which no kernel does all."""
    summed = [part for part in order if part.terms]
    if (window and further) or (summed and len(summed) < len(order)):
        raise InputError(
            "parts of one launch wait for their rows, or are summed with what peers push, or "
            "neither; make a table of each kind"
        )


def _does_more(part: GatedPart, n: int) -> bool:
    """Return whether a part does more than wait and be multiplied."""
    whole = part.col == 0 and part.cols == n
    return part.signal >= 0 or part.target != "c" or not whole or bool(part.terms)


def _turn(part: GatedPart) -> bool:
    """Return what parts are sorted by."""
    return part.source != "own"


def _cols(part: GatedPart, n: int) -> int:
    return n - part.col if part.cols is None else part.cols


def _col_step(order: list[GatedPart], n: int) -> int:
    """Return the largest power of two, at most 16, that divides where columns begin and end."""
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
        raise InputError(f"{part}: own rows are there before the launch; leave the word at -1")
    if min(part.a_row, part.c_row, part.rows) < 0 or min(part.word, part.signal) < -1:
        raise InputError(f"{part}: rows count from 0, and words are an index or -1")
    if part.col < 0 or _cols(part, n) < 0 or part.col + _cols(part, n) > n:
        raise InputError(f"{part}: its columns lie outside 0 to {n}")
    if not part.terms:
        return
    if part.source != "own" or part.target != "c":
        raise InputError(f"{part}: a summed part is of own rows, and goes to c")
    if part.terms.count(None) != 1:
        raise InputError(f"{part}: terms hold None once, in the place of the own product")
    if any(term.row < 0 or term.word < -1 for term in part.terms if term is not None):
        raise InputError(f"{part}: rows count from 0, and words are an index or -1")
