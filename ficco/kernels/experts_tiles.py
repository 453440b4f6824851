"""Tiles of the experts' products: rules of numbers that the host knows. No Triton."""

from __future__ import annotations

from typing import NamedTuple

_FEW_ROWS = 64  # of an expert on average: tiles of 64 rows
_FLAT_ROWS = 1024  # contracted in a gradient
_FLAT_DEPTH = 1024  # where a tile's stores take as long as many of its steps


class ExpertTile(NamedTuple):
    """A tile of a product, and how it is computed.

    Attributes:
        rows, cols: of the result.
        deep: of one step.
        panel: tiles of rows that take the same columns one after another.
        warps, stages: Triton's options.
        programs: of a multiprocessor.
    """

    rows: int
    cols: int
    deep: int
    panel: int
    warps: int
    stages: int
    programs: int = 1

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's constants."""
        return {
            "BLOCK_M": self.rows, "BLOCK_N": self.cols, "BLOCK_K": self.deep, "PANEL": self.panel,
        }  # fmt: skip


WIDE = ExpertTile(128, 256, 64, 8, 8, 4)
FLAT = ExpertTile(128, 128, 64, 16, 4, 3, programs=2)  # one multiplies while the other one stores
FEW = ExpertTile(64, 256, 64, 16, 4, 4)
BY_POINTERS = ExpertTile(128, 128, 32, 16, 8, 3)
GRADIENT = ExpertTile(128, 256, 64, 16, 8, 3)
GRADIENT_FLAT = ExpertTile(128, 128, 64, 16, 4, 3)  # two programs on a multiprocessor
# Loads by index are issued by half as many steps earlier as there are stages.
GRADIENT_BY_INDEX = ExpertTile(128, 256, 64, 16, 8, 5)


def product_tile(per_expert: int, d: int, bulk: bool) -> ExpertTile:
    """Return the tile of a product, the best of those of bench/grouped_gemm.py on an H200.

    Args:
        per_expert: rows of an expert on average.
        d: depth.
        bulk: whether weights can be loaded in bulk.
    """
    if not bulk or d % WIDE.deep:
        return BY_POINTERS
    if per_expert <= _FEW_ROWS:
        return FEW
    return FLAT if d <= _FLAT_DEPTH else WIDE


def gradient_tile(per_expert: int, bulk: bool, indexed: bool) -> ExpertTile:
    """Return the tile of a weight's gradient.

    Args:
        per_expert: rows of an expert on average.
        bulk: whether rows can be loaded in bulk.
        indexed: whether rows are found by index.
    """
    if not bulk:
        return BY_POINTERS
    if indexed:
        return GRADIENT_BY_INDEX
    return GRADIENT_FLAT if per_expert <= _FLAT_ROWS else GRADIENT
