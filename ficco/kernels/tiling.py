"""Tile configurations of the gated GEMM, by shape class, and the choice among them.

Numbers only: neither torch nor Triton is needed here. A persistent GEMM lasts as many rounds as
its tiles take over the multiprocessors, times what a tile of the kind costs; ragged last tiles of
parts and of columns cost as much as whole ones. Tiles of a round that is not full are shared where
that gains: then it lasts as long as it is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

__all__ = [
    "TILES", "UNSHARED", "Shares", "Tile", "busiest", "choose_tile", "count_tiles", "shared_tiles",
]  # fmt: skip


class Tile(NamedTuple):
    """How the GEMM is cut on a multiprocessor.

    Attributes:
        rows, cols: of c that a program makes at a time; powers of two.
        deep: of k that a step takes; a power of two.
        warps, stages: of a program; stages are steps of k in flight.
        group: rows of tiles that are visited together, so that they share columns of b in L2.
        per_sm: programs that fit on a multiprocessor.
        speed: of a full multiprocessor on such tiles, against the first of the class.
    """

    rows: int
    cols: int
    deep: int
    warps: int
    stages: int
    group: int
    per_sm: int
    speed: float


# Of several tiles the one that is estimated fastest is taken; the first where they are equal.
# Speeds of the first three of 2 bytes are against the first over 13 gathers and 10 pushes (H200,
# 2026-11-22: 0.80 to 0.83 and 0.81 to 0.92; 0.86 to 0.93 and 0.79 to 0.88); the others are
# estimates. With bulk loads those of 2 bytes spill no registers, and so many programs fit.
TILES: dict[int, tuple[Tile, ...]] = {  # by bytes of an element
    2: (
        # The most multiplications for a byte that is read. Groups of 8 rows cost 3 %.
        Tile(128, 256, 64, 8, 3, 16, 1, 1.00),
        # Where the former leaves much of the last round empty.
        Tile(128, 128, 64, 8, 4, 8, 1, 0.85),
        # Parts of up to 64 rows.
        Tile(64, 256, 64, 4, 4, 8, 1, 0.87),
        # Few rows and columns: rows beyond a part would be multiplied in vain.
        Tile(64, 128, 64, 4, 4, 8, 2, 0.75),
        # Too few tiles for all multiprocessors.
        Tile(64, 64, 64, 4, 4, 8, 2, 0.50),
    ),
    4: (
        # float32 is multiplied on the ordinary units, from registers: larger tiles spill.
        Tile(128, 64, 16, 8, 3, 8, 1, 1.00),
        # Few rows or few tiles.
        Tile(64, 64, 16, 4, 3, 8, 2, 0.90),
        Tile(32, 32, 32, 4, 3, 8, 2, 0.60),
    ),
}


# The depth at which a multiplication of elements lasts as long as their push to a peer, at 2 bytes:
# 790 TFLOP/s and 390 GB/s (H200 and its NVLink switch). It only weighs ends of a launch.
_PUSH_DEPTH = 2000


class Shares(NamedTuple):
    """The last tiles of a launch, where several programs make each of them.

    Attributes:
        tiles: how many.
        among: programs that share each; 1: no tile is shared.
    """

    tiles: int
    among: int


UNSHARED = Shares(0, 1)

# What sharing costs, as depth that is multiplied meanwhile (H200, 2026-11-22, four shapes), and how
# many share a tile at most, as one of them adds up what all have made.
_SHARE_DEPTH = 1200
_MOST_SHARES = 4
_LEAST_STEPS = 16  # of the depth; an end has some more than other slices


def shared_tiles(tiles: int, most: int, at_once: int, tile: Tile, k: int) -> Shares:
    """Return which tiles of a last round that is half empty programs had better share.

    Args:
        tiles: of a launch.
        most: of them that can be shared, which come last.
        at_once: programs that run at a time.
        tile: how the GEMM is cut.
        k: depth.
    """
    rest = tiles % at_once
    if rest > most:
        return UNSHARED
    among = min(at_once // max(rest, 1), _MOST_SHARES)
    gains = k - k / among > _SHARE_DEPTH and k >= _LEAST_STEPS * tile.deep
    return Shares(rest, among) if rest and gains else UNSHARED


def count_tiles(rows: Sequence[int], cols: Sequence[int], tile: Tile) -> list[int]:
    """Return the tiles of every part of so many rows and columns."""
    return [-(-r // tile.rows) * -(-c // tile.cols) for r, c in zip(rows, cols, strict=True)]


def choose_tile(
    rows: Sequence[int],
    cols: Sequence[int],
    element_bytes: int,
    processors: int,
    aligned: bool = True,
    pushed: Sequence[bool] = (),
    k: int = 0,
    apart: int | None = 0,
) -> Tile:
    """Return the tile for parts of so many rows and columns.

    Where parts are pushed, a launch is as long as its last push, if that ends later. Pushes follow
    one another, and begin when a part is made: so whole rounds before the first push count, and
    parts whose last tiles begin another round.

    Args:
        rows: of every part, in the order in which they are made.
        cols: likewise.
        element_bytes: of the operands, 2 or 4.
        processors: multiprocessors.
        aligned: whether rows of a begin at multiples of 16 bytes. Elements are loaded one by one
            where they do not, and then larger tiles than the last of the class spill registers.
        pushed: whether each part is pushed when it is made; by default none is.
        k: depth. It matters only where parts are pushed, or tiles are shared.
        apart: how many parts, the first ones, have tiles that are not shared; None: all.
    """

    def cost(tile: Tile) -> float:
        """Return the end, in what an element's multiplication takes one multiprocessor."""
        made = _made(tile, rows, cols, processors, k, apart)
        push_end = 0.0
        for i in range(len(pushed)):
            if pushed[i]:
                push = rows[i] * cols[i] * _PUSH_DEPTH / max(k, 1) / processors
                push_end = max(push_end, made[i]) + push
        return max(push_end, made[-1] if made else 0.0)

    if not aligned:
        return TILES[element_bytes][-1]
    return min(_fitting(rows, element_bytes), key=cost)


def busiest(
    rows: Sequence[int], cols: Sequence[int], element_bytes: int, processors: int, k: int
) -> float:
    """Return how many elements of c the busiest multiprocessor makes in a launch, by whole rounds.

    As many as it makes of the fastest tiles in that time, of parts that nothing waits for; the
    arguments are those of `choose_tile`.
    """
    return min(
        _made(tile, rows, cols, processors, k, 0)[-1] for tile in _fitting(rows, element_bytes)
    )


def _fitting(rows: Sequence[int], element_bytes: int) -> list[Tile]:
    """Return the tiles that are not far too high for parts of so many rows."""
    tiles = TILES[element_bytes]
    most, least = max(rows, default=0), min(tile.rows for tile in tiles)
    return [tile for tile in tiles if tile.rows < 2 * most or tile.rows == least]


def _made(
    tile: Tile,
    rows: Sequence[int],
    cols: Sequence[int],
    processors: int,
    k: int,
    apart: int | None,
) -> list[float]:
    """Return when each part is made, in what an element's multiplication takes a multiprocessor."""
    at_once = processors * tile.per_sm
    round_cost = tile.per_sm * tile.rows * tile.cols / tile.speed
    done = list(accumulate(count_tiles(rows, cols, tile), initial=0))
    made = [-(-each // at_once) * round_cost for each in done[1:]]
    most = 0 if apart is None else done[-1] - done[apart]
    last = shared_tiles(done[-1], most, at_once, tile, k)
    if last.tiles:
        rounds = done[-1] // at_once + 1 / last.among + _SHARE_DEPTH / k
        made[-1] = rounds * round_cost
    return made
