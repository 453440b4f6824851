"""Curves: what was measured at some points, and what it means between them. No machine here."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from statistics import median

from ficco.errors import MachineError

__all__ = ["LEAST", "MOST", "Curve", "GemmTimes"]

LEAST, MOST = 1e-6, 1e12  # of rates and times: GB/s, GFLOP/s, us


@dataclass(frozen=True, slots=True)
class Curve:
    """A quantity over a size: straight between its points over the size's log, level beyond them.

    Attributes:
        points: (size, value) by rising size.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if sizes != sorted(set(sizes)) or any(size <= 0 for size in sizes):
            raise MachineError(f"sizes {sizes} must be positive and rise")
        if any(not LEAST <= value <= MOST for _, value in self.points):
            raise MachineError(f"every value of a curve is a number from {LEAST:g} to {MOST:g}")

    def __bool__(self) -> bool:
        return bool(self.points)

    def at(self, size: float) -> float:
        """Return the value at a size. The curve has a point."""
        place = bisect_right(self.points, (size, math.inf))
        if place == 0:
            return self.points[0][1]
        if place == len(self.points):
            return self.points[-1][1]
        (size0, value0), (size1, value1) = self.points[place - 1 : place + 1]
        return value0 + (value1 - value0) * math.log(size / size0) / math.log(size1 / size0)

    def scaled(self, size: float) -> float:
        """Return a time at a size: straight over the size itself, and growing with it beyond."""
        place = bisect_right(self.points, (size, math.inf))
        if place == 0:
            return self.points[0][1]
        if place == len(self.points):
            return self.points[-1][1] * size / self.points[-1][0]
        (size0, time0), (size1, time1) = self.points[place - 1 : place + 1]
        return time0 + (time1 - time0) * (size - size0) / (size1 - size0)


# A library multiplies in tiles, in rounds over all multiprocessors. On an H200 (840 shapes of
# cuBLAS, bench/NOTES.md) times follow tiles of this size; a last round that is not full costs a
# little of a whole one, every tile as much as so many columns of k more, and a call so many us.
TILE_M, TILE_N, TILE_K, ROUNDED, START_US = 64, 128, 170, 0.12, 3.5
CORE_START_US = 1.0  # of a call on one core, before the library multiplies
NEIGHBOURS = 12
_NEAR = 0.1  # squared distance, in doublings, within which points count alike


@dataclass(frozen=True, slots=True)
class GemmTimes:
    """How long GEMMs last on one device, from points that were measured.

    Between points the time follows the tiles: rounds of tiles over the multiprocessors, bound by
    memory where that is slower. The nearest points say by how much reality differs. One core of a
    processor knows no such tiles: there the time follows the operations.

    Attributes:
        points: (m, n, k, us).
        units: multiprocessors.
        memory_gbps: rate of memory; 0: not known.
        tiled: whether it is tiles that the time follows.
    """

    points: tuple[tuple[int, int, int, float], ...]
    units: int
    memory_gbps: float = 0.0
    tiled: bool = True
    _places: tuple[tuple[float, float, float, float], ...] = field(init=False, repr=False)
    _us_per_flop: float = field(init=False, repr=False)
    _start_us: float = field(init=False, repr=False)
    _known: dict[tuple[int, int, int], float] = field(
        init=False, repr=False, compare=False, hash=False
    )

    def __post_init__(self) -> None:
        if not self.points:
            raise MachineError("gemm points: at least one [m, n, k, us] is needed")
        if any(not all(LEAST <= v <= MOST for v in point) for point in self.points):
            raise MachineError(
                f"gemm points: all of [m, n, k, us] are numbers from {LEAST:g} to {MOST:g}"
            )
        if self.units < 1:
            raise MachineError("gemm points need `units`, the number of multiprocessors, too")
        object.__setattr__(self, "_known", {})
        start = START_US if self.tiled else CORE_START_US
        slow = [
            (us - start) / (2.0 * self._padded(m, n, k))
            for m, n, k, us in self.points
            if us > 4 * start
        ] or [us / (2.0 * self._padded(m, n, k)) for m, n, k, us in self.points]
        object.__setattr__(self, "_us_per_flop", median(slow))
        object.__setattr__(self, "_start_us", start)
        places = tuple(
            (math.log2(m), math.log2(n), math.log2(k), math.log(us / self.tiled_us(m, n, k)))
            for m, n, k, us in self.points
        )
        object.__setattr__(self, "_places", places)

    def us(self, m: int, n: int, k: int) -> float:
        """Return the time of [m, k] . [k, n]; 0 for an empty product."""
        if not (m and n and k):
            return 0.0
        found = self._known.get((m, n, k))
        if found is None:
            if len(self._known) > 4096:
                self._known.clear()
            found = self._known[m, n, k] = self.tiled_us(m, n, k) * math.exp(self._off(m, n, k))
        return found

    def tiled_us(self, m: float, n: float, k: float) -> float:
        """Return the time by rounds of tiles and memory alone, without the points around it."""
        tiled = 2.0 * self._padded(m, n, k) * self._us_per_flop
        if not self.memory_gbps:
            return tiled + self._start_us
        memory = 2.0 * (m * k + k * n + m * n) / (self.memory_gbps * 1e3)
        return float((tiled**4 + memory**4) ** 0.25) + self._start_us

    def busy_us(self, elements: float, k: int) -> float:
        """Return how long one multiprocessor takes to make so many elements of a product."""
        return 2.0 * elements * (k + TILE_K) * self.units * self._us_per_flop + self._start_us

    def _padded(self, m: float, n: float, k: float) -> float:
        """Return m.n.k, rounded up to tiles and, in part, to rounds of them, if it is tiled."""
        if not self.tiled:
            return m * n * k
        rounds = self.rounds(m, n)
        full = (1 - ROUNDED) * max(rounds, 1.0) + ROUNDED * math.ceil(rounds - 1e-9)
        return full * self.units * TILE_M * TILE_N * (k + TILE_K)

    def rounds(self, m: float, n: float) -> float:
        """Return rounds of tiles over all multiprocessors; the last one may be in part."""
        return math.ceil(m / TILE_M) * math.ceil(n / TILE_N) / self.units

    def _off(self, m: int, n: int, k: int) -> float:
        """Return the log of reality over tiles, of the nearest points."""
        x, y, z = math.log2(m), math.log2(n), math.log2(k)
        near = sorted(
            ((px - x) ** 2 + (py - y) ** 2 + (pz - z) ** 2, off) for px, py, pz, off in self._places
        )[:NEIGHBOURS]
        weighed = [(1.0 / (distance + _NEAR), off) for distance, off in near]
        return sum(weight * off for weight, off in weighed) / sum(weight for weight, _ in weighed)
