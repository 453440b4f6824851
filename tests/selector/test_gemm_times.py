"""Times of GEMMs between the measured ones."""

from __future__ import annotations

import math

import pytest

from ficco.core.curves import GemmTimes
from ficco.core.errors import MachineError


def test_points_are_met_and_odd_sizes_follow_tiles() -> None:
    rate = 1e-6
    points = tuple(
        (m, n, k, 3.5 + 2.0 * m * n * k * rate)
        for m in (512, 2048, 8192) for n in (512, 4096) for k in (1024, 8192)
    )  # fmt: skip
    times = GemmTimes(points, units=8)
    for m, n, k, us in points:
        assert times.us(m, n, k) == pytest.approx(us, rel=0.25)
    assert times.us(4096, 2048, 4096) == pytest.approx(2.0 * 4096 * 2048 * 4096 * rate, rel=0.2)
    assert times.us(1, 1, 1024) < times.us(513, 513, 1024)
    assert times.us(0, 5, 5) == 0.0
    assert times.tiled_us(65, 129, 512) == times.tiled_us(128, 256, 512)


@pytest.mark.parametrize("points", [(), ((0, 1, 1, 1.0),), ((1, 1, 1, math.nan),)])
def test_points_that_cannot_be(points: tuple[tuple[int, int, int, float], ...]) -> None:
    with pytest.raises(MachineError):
        GemmTimes(points, units=1)
