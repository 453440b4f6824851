"""How much of the host engine is measured: all of it for a file, or enough for a first call."""

from __future__ import annotations

from typing import NamedTuple

from ficco.profiling.grids import HOST_GEMMS, QUICK_GEMMS, Shape

__all__ = ["THOROUGH", "Extent", "quick"]


class Extent(NamedTuple):
    """Sizes and repetitions of a measurement.

    Attributes:
        rows: of 8 KiB, that the largest copy has.
        runs: of a plan, of which the fastest counts.
        turns: of a GEMM, likewise.
        turn_us: what a turn should last.
        shapes: of GEMMs.
        budget_s: after which no more shapes of a dtype are begun; those left out are the largest.
        gemms: of one plan, where GEMMs run beside copies.
        probes: turns of whole calls.
    """

    rows: int
    runs: int
    turns: int
    turn_us: float
    shapes: tuple[Shape, ...]
    budget_s: float
    gemms: int
    probes: int


THOROUGH = Extent(2048, 9, 5, 10_000.0, HOST_GEMMS, 6.0, 20, 12)
_QUICK_ROWS, _MOST_ROWS = 4096, 1024  # of all ranks, of one


def quick(world: int) -> Extent:
    """Return what is measured before a first call of so many ranks: the more, the less of each."""
    rows = max(64, min(_MOST_ROWS, _QUICK_ROWS // world))
    return Extent(rows, 5, 4, 1_000.0, QUICK_GEMMS, 0.1, 5, 8)
