"""Medians, spreads and ideal times of measurements, and the fastest of them. Data only."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["fastest", "ideal", "medians", "spread"]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the interquartile range, which is 0 for one value."""
    if len(values) < 2:
        return values[0], 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, high - low


def medians(times: Mapping[Any, Sequence[float]]) -> dict[Any, float]:
    """Return the median of each entry that has times."""
    return {key: statistics.median(values) for key, values in times.items() if values}


def fastest(values: Mapping[str, float], count: int) -> list[str]:
    """Return the `count` names with the lowest values, lowest first; ties sort by name."""
    return sorted(values, key=lambda name: (values[name], name))[:count]


def ideal(gemm_ms: float | None, transfers_ms: Iterable[float]) -> dict[str, float | None]:
    """Return the GEMM alone, the fastest transfer alone, and the larger of the two."""
    transfer = min(transfers_ms, default=None)
    both = [value for value in (gemm_ms, transfer) if value]
    return {
        "gemm_ms": gemm_ms,
        "transfer_ms": transfer,
        "ideal_ms": max(both) if len(both) == 2 else None,
    }
