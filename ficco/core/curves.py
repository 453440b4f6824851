"""Curves: interpolation between measured points."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from statistics import median

from ficco.core.errors import MachineError, shown

LEAST, MOST = 1e-6, 1e12  # of rates and times: GB/s, GFLOP/s, us


@dataclass(frozen=True, slots=True)
class Curve:
    """A quantity over a size: linear in the size's log between points, constant beyond them.

    Attributes:
        points: (size, value) by increasing size.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        before = 0.0
        for at, (size, value) in enumerate(self.points):
            if not size > before:
                raise MachineError(
                    f"point {at} is [{size:g}, {value:g}]: its size, {size:g}, must be above "
                    f"{before:g}; sizes are positive and increase"
                )
            if not LEAST <= value <= MOST:
                raise MachineError(
                    f"point {at} is [{size:g}, {value:g}]: its value, {value:g}, must be from "
                    f"{LEAST:g} to {MOST:g}"
                )
            before = size

    def __bool__(self) -> bool:
        return bool(self.points)

    def at(self, size: float) -> float:
        """Return the value at a size. The curve must have a point."""
        place = bisect_right(self.points, (size, math.inf))
        if place == 0:
            return self.points[0][1]
        if place == len(self.points):
            return self.points[-1][1]
        (size0, value0), (size1, value1) = self.points[place - 1 : place + 1]
        return value0 + (value1 - value0) * math.log(size / size0) / math.log(size1 / size0)

    def scaled(self, size: float) -> float:
        """Return a time at a size: linear in the size, and proportional beyond the last point."""
        place = bisect_right(self.points, (size, math.inf))
        if place == 0:
            return self.points[0][1]
        if place == len(self.points):
            return self.points[-1][1] * size / self.points[-1][0]
        (size0, time0), (size1, time1) = self.points[place - 1 : place + 1]
        return time0 + (time1 - time0) * (size - size0) / (size1 - size0)


# A library multiplies in tiles, in rounds over all multiprocessors. On an H200 (840 shapes of
# cuBLAS, bench/NOTES.md) times follow tiles of TILE_M x TILE_N. A partial last round costs a share
# ROUNDED of a full one; each tile costs as much as TILE_K more columns of k; each call START_US.
TILE_M, TILE_N, TILE_K, ROUNDED, START_US = 64, 128, 170, 0.12, 3.5
# Of a gated launch, each tile costs as much as GATED_TILE_K more columns: less of its begin and end
# is hidden. Fitted to gathers of many rows on 2 H100s, which 170 predicts 5% too short. Profiles
# contain what gated GEMMs take longer than the library's at GATED_DEPTH columns.
GATED_TILE_K, GATED_DEPTH = 340, 8192
CORE_START_US = 1.0  # of a call on one core, before the library multiplies
NEIGHBORS = 12
_MAX_SORTED = 256  # kept orders of columns
Column = list[tuple[float, float]]  # points of one n and k: log2 of m, log of measured over modeled
_NEAR_DISTANCE = 0.1  # squared distance, in doublings, within which points weigh about the same


@dataclass(frozen=True, slots=True)
class GemmTimes:
    """GEMM times on one device, from measured points.

    Between points the time follows the tile model: rounds of tiles over the multiprocessors, or the
    memory rate if that is slower. The nearest points correct the model. On one core of a CPU, the
    time follows the operations instead of tiles.

    Attributes:
        points: (m, n, k, us).
        units: number of multiprocessors.
        memory_gbps: memory rate in GB/s; 0: not known.
        tiled: whether times follow the tile model.
    """

    points: tuple[tuple[int, int, int, float], ...]
    units: int
    memory_gbps: float = 0.0
    tiled: bool = True
    _columns: dict[tuple[float, float], Column] = field(
        init=False, repr=False, compare=False, hash=False
    )
    _sorted: dict[tuple[float, float], list[tuple[float, Column]]] = field(
        init=False, repr=False, compare=False, hash=False
    )
    _us_per_flop: float = field(init=False, repr=False)
    _start_us: float = field(init=False, repr=False)
    _known: dict[tuple[float, float, float], float] = field(
        init=False, repr=False, compare=False, hash=False
    )

    def __post_init__(self) -> None:
        if not self.points:
            raise MachineError("no point found: at least one [m, n, k, us] is needed")
        for at, point in enumerate(self.points):
            if not all(LEAST <= v <= MOST for v in point):
                raise MachineError(
                    f"point {at} is {list(point)}: all of [m, n, k, us] must be from {LEAST:g} to "
                    f"{MOST:g}"
                )
        if not 1 <= self.units <= MOST:
            raise MachineError(
                f"units={shown(self.units)}: GEMM times also need the field `units`, the number of "
                f"multiprocessors, from 1 to {MOST:g}"
            )
        object.__setattr__(self, "_known", {})
        start = START_US if self.tiled else CORE_START_US
        slow = [
            (us - start) / (2.0 * self._padded(m, n, k))
            for m, n, k, us in self.points
            if us > 4 * start
        ] or [us / (2.0 * self._padded(m, n, k)) for m, n, k, us in self.points]
        object.__setattr__(self, "_us_per_flop", median(slow))
        object.__setattr__(self, "_start_us", start)
        columns: dict[tuple[float, float], Column] = {}
        for m, n, k, us in self.points:
            column = columns.setdefault((math.log2(n), math.log2(k)), [])
            column.append((math.log2(m), math.log(us / self.tiled_us(m, n, k))))
        object.__setattr__(self, "_columns", columns)
        object.__setattr__(self, "_sorted", {})

    def us(self, m: float, n: float, k: float) -> float:
        """Return the time of [m, k] . [k, n]; 0 for an empty product."""
        if not (m and n and k):
            return 0.0
        time_us = self._known.get((m, n, k))
        if time_us is None:
            if len(self._known) > 4096:
                self._known.clear()
            time_us = self._known[m, n, k] = self.tiled_us(m, n, k) * math.exp(
                self._log_ratio(m, n, k)
            )
        return time_us

    def tiled_us(self, m: float, n: float, k: float) -> float:
        """Return the time of the tile and memory model, without correction by measured points."""
        tiled = 2.0 * self._padded(m, n, k) * self._us_per_flop
        if not self.memory_gbps:
            return tiled + self._start_us
        memory = 2.0 * (m * k + k * n + m * n) / (self.memory_gbps * 1e3)
        return float((tiled**4 + memory**4) ** 0.25) + self._start_us

    def gated_us(self, library_us: float, work: float, k: int) -> float:
        """Return the time of a gated launch: at least that of the rounds of its tiles.

        Args:
            library_us: that of the library, with the profile's factor for a depth of GATED_DEPTH.
            work: of one multiprocessor, see `tiling.work_of`.
            k: depth.
        """
        deep = (GATED_DEPTH + TILE_K) / (GATED_DEPTH + GATED_TILE_K)
        slower = (k + GATED_TILE_K) / (k + TILE_K) * deep
        rounds_us = 2.0 * work * (k + GATED_TILE_K) * self.units * self._us_per_flop
        return max(library_us * slower, rounds_us + self._start_us)

    def _padded(self, m: float, n: float, k: float) -> float:
        """Return m.n.k, rounded up to tiles and partly to rounds of tiles if `tiled`."""
        if not self.tiled:
            return m * n * k
        rounds = self.rounds(m, n)
        full = (1 - ROUNDED) * max(rounds, 1.0) + ROUNDED * math.ceil(rounds - 1e-9)
        return full * self.units * TILE_M * TILE_N * (k + TILE_K)

    def rounds(self, m: float, n: float) -> float:
        """Return the number of rounds of tiles over all multiprocessors, as a fraction."""
        return math.ceil(m / TILE_M) * math.ceil(n / TILE_N) / self.units

    def _log_ratio(self, m: float, n: float, k: float) -> float:
        """Return the log of measured over modeled time, averaged over the nearest points.

        All points as near as the last of these count. Points come in columns of equal n and k: the
        columns are looked at by their distance, and few of them have a near point.
        """
        x, near, far = math.log2(m), list[tuple[float, float]](), math.inf
        for apart, column in self._columns_by_distance(n, k):
            if apart > far:
                break
            for px, ratio in column:
                distance = apart + (px - x) * (px - x)
                if distance <= far:
                    near.append((distance, ratio))
            if len(near) >= NEIGHBORS:
                near.sort()
                far = near[NEIGHBORS - 1][0]
        weighted = [(1.0 / (d + _NEAR_DISTANCE), ratio) for d, ratio in near if d <= far]
        return sum(w * ratio for w, ratio in weighted) / sum(w for w, _ in weighted)

    def _columns_by_distance(self, n: float, k: float) -> list[tuple[float, Column]]:
        """Return squared distances in n and k, and the points that have them, the nearest first."""
        found = self._sorted.get((n, k))
        if found is None:
            if len(self._sorted) > _MAX_SORTED:
                self._sorted.clear()
            y, z = math.log2(n), math.log2(k)
            found = self._sorted[n, k] = sorted(
                ((py - y) * (py - y) + (pz - z) * (pz - z), column)
                for (py, pz), column in self._columns.items()
            )
        return found
