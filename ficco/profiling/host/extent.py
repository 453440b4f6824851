"""The extent of a host engine measurement: full for a file, or quick before a first call."""

from __future__ import annotations

from typing import NamedTuple

from ficco.profiling.grids import HOST_GEMMS, QUICK_GEMMS, Shape

__all__ = ["THOROUGH", "Extent", "quick"]


class Extent(NamedTuple):
    """Sizes and repetitions of a measurement.

    Attributes:
        rows: rows of 8 KiB in the largest copy.
        runs: runs of a plan; the fastest counts.
        turns: turns of a GEMM; the fastest counts.
        turn_us: intended time of a turn.
        shapes: shapes of GEMMs.
        budget_s: time after which no more shapes of a dtype are started; the largest are left out.
        gemms: GEMMs of one plan in which GEMMs run beside copies.
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
_QUICK_ROWS, _MOST_ROWS = 4096, 1024  # rows of all ranks, most rows of one


def quick(world: int) -> Extent:
    """Return the extent of a measurement before a first call; with more ranks, fewer rows each."""
    rows = max(64, min(_MOST_ROWS, _QUICK_ROWS // world))
    return Extent(rows, 5, 4, 1_000.0, QUICK_GEMMS, 0.1, 5, 8)
