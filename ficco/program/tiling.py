"""Tile configurations of the gated GEMM, by shape class, and the choice among them.

Numbers only: neither torch nor Triton is needed here. The model: a persistent GEMM takes the number
of rounds of its tiles over the multiprocessors, times the cost of such a tile. Partial tiles at the
end of parts and columns cost as much as whole ones. Tiles of a partial round are split (split-k) if
that gains; the round then takes the fraction of a round that it fills. Each part reads all of b.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Tile(NamedTuple):
    """A tile configuration of the GEMM.

    Attributes:
        rows, cols: size in c, powers of two.
        deep: depth of a step of k, a power of two.
        warps, stages: of a program; stages are steps of k in flight.
        group: rows of tiles that are visited together, so that they share columns of b in L2.
        per_sm: programs that fit on a multiprocessor.
        speed: speed of a full multiprocessor with such tiles, relative to the first of the class.
        read: cost of reading a column of b once for each part, in elements that a multiprocessor
            computes in that time.
    """

    rows: int
    cols: int
    deep: int
    warps: int
    stages: int
    group: int
    per_sm: int
    speed: float
    read: float = 0.0


# The tile with the fastest estimate is chosen, the first of equals. Speeds and reads of 2 bytes
# were fitted to the times of all tiles on 29 random shapes with 2 to 7 parts (H100, 2026-11-27,
# bench/NOTES.md). There the chosen tile takes 1% longer than the fastest, in the geometric mean.
# Those of 4 bytes are estimates. With bulk loads, tiles of 2 bytes spill no
# registers, and `per_sm` programs fit.
TILES: dict[int, tuple[Tile, ...]] = {  # by bytes of an element
    2: (
        # The most multiplications per byte read. Groups of 8 rows cost 3 %.
        Tile(128, 256, 64, 8, 3, 16, 1, 1.00, 1.5),
        # If the former leaves much of the last round empty.
        Tile(128, 128, 64, 8, 4, 8, 1, 0.77, 2.0),
        # Parts of up to 64 rows.
        Tile(64, 256, 64, 4, 4, 8, 1, 0.64, 1.5),
        # Few rows and columns: larger tiles would multiply unused rows.
        Tile(64, 128, 64, 4, 4, 8, 2, 0.56, 2.0),
        # Too few tiles for all multiprocessors.
        Tile(64, 64, 64, 4, 4, 8, 2, 0.33, 2.4),
    ),
    4: (
        # float32 is multiplied on the ordinary units, from registers: larger tiles spill.
        Tile(128, 64, 16, 8, 3, 8, 1, 1.00),
        # Few rows or few tiles.
        Tile(64, 64, 16, 4, 3, 8, 2, 0.90),
        Tile(32, 32, 32, 4, 3, 8, 2, 0.60),
    ),
}


# The depth at which the multiplication of elements takes as long as their push to a peer, at 2
# bytes: 790 TFLOP/s and 390 GB/s (H200 and its NVLink switch). It only affects ends of a launch.
_PUSH_DEPTH = 2000


class Shares(NamedTuple):
    """The split tiles of a launch, its last ones, which several programs compute together.

    Attributes:
        tiles: number of split tiles.
        among: programs per split tile; 1: no tile is split.
    """

    tiles: int
    among: int


UNSHARED = Shares(0, 1)

# The cost of a split, as the depth that is multiplied in that time (H100, 2026-11-27, 18 shapes of
# few tiles), and the most programs per tile, as one of them sums all slices. 8 were faster for a k
# above 18,000 only, and slower for smaller ones.
_SHARE_DEPTH = 1600
_MOST_SHARES = 4
# The time of a program that has a multiprocessor for itself, over that of two that share one, for
# tiles of which two fit (fitted as the speeds above).
_ALONE = 0.51
_LEAST_STEPS = 16  # of the depth; an end has some more steps than other slices


def shared_tiles(tiles: int, at_once: int, tile: Tile, k: int) -> Shares:
    """Return which tiles of a last round that is at least half empty should be split.

    Args:
        tiles: number of tiles of a launch.
        at_once: programs that run at a time.
        tile: tile configuration.
        k: depth.
    """
    rest = tiles % at_once
    among = min(at_once // max(rest, 1), _MOST_SHARES)
    gains = k - k / among > _SHARE_DEPTH and k >= _LEAST_STEPS * tile.deep
    return Shares(rest, among) if rest and gains else UNSHARED


def count_tiles(rows: Sequence[int], cols: Sequence[int], tile: Tile) -> list[int]:
    """Return the number of tiles of every part, by its rows and columns."""
    return [-(-r // tile.rows) * -(-c // tile.cols) for r, c in zip(rows, cols, strict=True)]


def choose_tile(
    rows: Sequence[int],
    cols: Sequence[int],
    element_bytes: int,
    processors: int,
    aligned: bool = True,
    pushed: Sequence[bool] = (),
    k: int = 0,
    split: bool = True,
) -> Tile:
    """Return the tile for parts of these rows and columns.

    If parts are pushed, a launch takes until its last push if that ends later. Pushes are serial
    and begin when a part is complete. So the time before the first push counts, and parts whose
    last tiles begin another round.

    Args:
        rows: rows of every part, in the order of computation.
        cols: likewise.
        element_bytes: of the operands, 2 or 4.
        processors: multiprocessors.
        aligned: whether rows of a begin at multiples of 16 bytes. Otherwise elements are loaded one
            by one, and tiles larger than the last of the class spill registers.
        pushed: whether each part is pushed when it is complete; by default none is.
        k: depth. It matters only if parts are pushed or tiles are split.
        split: whether tiles may be split.
    """

    def cost(tile: Tile) -> float:
        """Return the end, in units of one element's multiplication on a multiprocessor."""
        ends = _made(tile, rows, cols, processors, k, split)
        push_end = 0.0
        for i in range(len(pushed)):
            if pushed[i]:
                push = rows[i] * cols[i] * _PUSH_DEPTH / max(k, 1) / processors
                push_end = max(push_end, ends[i]) + push
        return max(push_end, ends[-1] if ends else 0.0)

    if not aligned:
        return TILES[element_bytes][-1]
    return min(_fitting(rows, element_bytes), key=cost)


class Work(NamedTuple):
    """The time of a launch, as work of one multiprocessor, for predictions.

    The unit is the time of one element of c by a library, at its median rate.

    Attributes:
        whole: of all parts, if none waits.
        last: of the last part, if it comes when all others are complete; at most `whole`. It may
            jump where another tile is chosen, or where tiles are split.
    """

    whole: float
    last: float


# The time of the fastest tiles of a class, over that of as much work by a library at its median
# rate (for 2 bytes fitted to 330 gathers on random shapes, 2 and 4 H100s, 2026-11-27).
_FASTEST = {2: 0.87, 4: 1.0}


def work_of(
    rows: Sequence[int],
    cols: Sequence[int],
    element_bytes: int,
    processors: int,
    k: int,
    split: bool = True,
) -> Work:
    """Return the work of a launch whose parts are not pushed.

    The arguments are those of `choose_tile`. Rows are taken to be aligned, since ranks do not share
    their depths. Parts without elements are left out.
    """
    sizes = [(r, c) for r, c in zip(rows, cols, strict=True) if r and c]
    if not sizes:
        return Work(0.0, 0.0)
    rows, cols = [r for r, _ in sizes], [c for _, c in sizes]
    tile = choose_tile(rows, cols, element_bytes, processors, True, (), k, split)
    whole = _made(tile, rows, cols, processors, k, split)[-1]
    counts = count_tiles(rows, cols, tile)
    at_once, shares, round_cost = _rounds(tile, counts, processors, k, split)
    shared = min(shares.tiles, counts[-1])
    rounds: float = -(-(counts[-1] - shared) // at_once)
    if shared:
        rounds += 1 / shares.among + _SHARE_DEPTH / k
    last = math.hypot(rounds * round_cost, cols[-1] * tile.read)
    factor = _FASTEST[element_bytes]
    return Work(factor * whole, factor * min(last, whole))


def _fitting(rows: Sequence[int], element_bytes: int) -> list[Tile]:
    """Return the tiles that are not far too high for parts of these rows."""
    tiles = TILES[element_bytes]
    most, least = max(rows, default=0), min(tile.rows for tile in tiles)
    return [tile for tile in tiles if tile.rows < 2 * most or tile.rows == least]


def _made(
    tile: Tile,
    rows: Sequence[int],
    cols: Sequence[int],
    processors: int,
    k: int,
    split: bool,
) -> list[float]:
    """Return when each part is complete, in units of `cost`."""
    counts = count_tiles(rows, cols, tile)
    at_once, last, round_cost = _rounds(tile, counts, processors, k, split)
    done = list(accumulate(counts))
    whole = sum(counts) - last.tiles  # a number of full rounds, if tiles are split
    split_end = whole / at_once + (1 / last.among + _SHARE_DEPTH / k if last.tiles else 0.0)
    rounds = [-(-count // at_once) if count <= whole else split_end for count in done]
    ends = [each * round_cost for each in rounds]
    reads = accumulate(width * tile.read for width in cols)
    return [math.hypot(end, read) for end, read in zip(ends, reads, strict=True)]


def _rounds(
    tile: Tile, counts: Sequence[int], processors: int, k: int, split: bool
) -> tuple[int, Shares, float]:
    """Return the programs that run at a time, the tiles that are split, and the cost of a round.

    A round costs less if each program has a multiprocessor for itself.
    """
    tiles, at_once = sum(counts), processors * tile.per_sm
    shares = shared_tiles(tiles, at_once, tile, k) if split else UNSHARED
    programs = max(min(tiles - shares.tiles, at_once), shares.tiles * shares.among)
    cost = tile.per_sm * tile.rows * tile.cols / tile.speed
    return at_once, shares, cost * (_ALONE if programs <= processors < at_once else 1.0)
