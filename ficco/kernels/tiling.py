"""Tile configurations of the gated GEMM, by shape class, and the choice among them.

Numbers only: neither torch nor Triton is needed here. A persistent GEMM lasts as many rounds as
its tiles take over the multiprocessors, times what a tile of the kind costs; ragged last tiles of
parts and of columns cost as much as whole ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["TILES", "Tile", "choose_tile", "count_tiles"]


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
# Speeds of the first three of 2 bytes are means against cuBLAS over 8 shapes in 4 and 8 parts
# (H200, 2026-11-21; 0.80 to 1.00, 0.87 to 0.93 and, at the whim of the parts, 0.72 to 1.04); the
# others are estimates. With bulk loads those of 2 bytes spill no registers, and so many programs
# fit.
TILES: dict[int, tuple[Tile, ...]] = {  # by bytes of an element
    2: (
        # Two programs on a multiprocessor: one multiplies while the other stores.
        Tile(128, 128, 64, 4, 3, 8, 2, 0.97),
        # Where pairs of the former leave the last round half empty; parts of up to 64 rows.
        Tile(64, 256, 64, 4, 4, 8, 1, 0.91),
        # The most multiplications for a byte that is read.
        Tile(128, 256, 64, 8, 4, 8, 1, 0.89),
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


def count_tiles(rows: Sequence[int], n: int, tile: Tile) -> list[int]:
    """Return the tiles of every part, for its rows and `n` columns."""
    columns = -(-n // tile.cols)
    return [-(-count // tile.rows) * columns for count in rows]


def choose_tile(
    rows: Sequence[int], n: int, element_bytes: int, processors: int, aligned: bool = True
) -> Tile:
    """Return the tile for parts of so many rows.

    Args:
        rows: of every part.
        n: columns of c.
        element_bytes: of the operands, 2 or 4.
        processors: multiprocessors.
        aligned: whether rows of a begin at multiples of 16 bytes. Elements are loaded one by one
            where they do not, and then larger tiles than the last of the class spill registers.
    """

    def cost(tile: Tile) -> float:
        rounds = -(-sum(count_tiles(rows, n, tile)) // (processors * tile.per_sm))
        return rounds * tile.per_sm * tile.rows * tile.cols / tile.speed

    tiles = TILES[element_bytes]
    if not aligned:
        return tiles[-1]
    most, least = max(rows, default=0), min(tile.rows for tile in tiles)
    fitting = [tile for tile in tiles if tile.rows < 2 * most or tile.rows == least]
    return min(fitting, key=cost)
