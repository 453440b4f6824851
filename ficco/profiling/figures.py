"""What is worked out from times: latencies, rates, least squares, names. No machine is touched."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from ficco.errors import InputError

__all__ = [
    "Points",
    "gbps",
    "latency_and_rates",
    "least_squares",
    "links_per",
    "model",
    "net_rates",
    "rounded",
    "slower",
    "slug",
    "steady",
]

Points = list[tuple[int, float]]

_MEMORY = re.compile(r"\d+GB|HBM\w*", re.IGNORECASE)

_STEADY, _TRIES = 1.1, 4  # a median is trusted up to so many times the least
_NOISE = 0.1  # a rate is trusted where the latency is no more than this part of the time
_MESH = 0.7  # of n times one peer's rate, from which on pairs have links of their own


def steady(measure: Callable[[], Sequence[float]]) -> float:
    """Return the median of times that lie together.

    A host that stalls while a GPU waits for it only lengthens what is timed. Where the median is
    far above the least, all times are taken anew, some times; the least median stands.
    """
    found = math.inf
    for _ in range(_TRIES):
        times = measure()
        middle = statistics.median(times)
        found = min(found, middle)
        if middle <= _STEADY * min(times):
            break
    return found


def gbps(size: float, us: float) -> float:
    """Return a rate in GB/s."""
    return size / (us * 1e3)


def latency_and_rates(times: Sequence[tuple[int, float]]) -> tuple[float, Points]:
    """Return what a transfer lasts besides its bytes, in us, and its rate without that, by size.

    Args:
        times: (bytes, us of one transfer), by rising size; the smallest gives the latency.
    """
    size, us = times[0]
    best = max(size / us for size, us in times)
    latency = max(0.0, us - size / best)
    return latency, net_rates([(size, size, us) for size, us in times], latency)


def net_rates(times: Sequence[tuple[int, int, float]], latency_us: float) -> Points:
    """Return rates of transfers without their latency.

    Where a transfer is nearly all latency its rate would be noise: it is held to the best of the
    others.

    Args:
        times: (what it is a point of, bytes, us of one transfer).
        latency_us: of every transfer.
    """
    trusted = [(size, us - latency_us) for _, size, us in times if latency_us <= _NOISE * us]
    most = max(gbps(size, us) for size, us in trusted or [(s, us) for _, s, us in times])
    return [
        (at, min(most, gbps(size, us - latency_us)) if us > latency_us else most)
        for at, size, us in times
    ]


def links_per(out_gbps: Sequence[tuple[int, float]]) -> str:
    """Return what a link's rate belongs to, "pair" or "port", from (peers at once, GB/s to all)."""
    if len(out_gbps) < 2:
        return "port"
    (_, one), (peers, together) = out_gbps[0], out_gbps[-1]
    return "pair" if together >= _MESH * peers * one else "port"


def least_squares(
    rows: Sequence[Sequence[float]], values: Sequence[float]
) -> tuple[list[float], float]:
    """Return the x of 0 or more for which rows . x is nearest to the values.

    The unknowns are few: every choice of those that are 0 is tried.

    Returns:
        x, and the root of the mean squared error.
    """
    matrix, wanted = np.array(rows, float), np.array(values, float)
    count = matrix.shape[1]
    best, least = np.zeros(count), float(np.sum(wanted**2))
    for size in range(1, count + 1):
        for kept in combinations(range(count), size):
            found = np.linalg.lstsq(matrix[:, kept], wanted, rcond=None)[0]
            error = float(np.sum((matrix[:, kept] @ found - wanted) ** 2))
            if (found >= 0).all() and error < least:
                best, least = np.zeros(count), error
                best[list(kept)] = found
    return [float(each) for each in best], float(np.sqrt(least / len(wanted)))


def slower(beside_us: float, alone_us: float) -> float:
    """Return how many times longer something lasts beside something else; never less than 1."""
    return max(1.0, beside_us / alone_us)


def rounded(value: Any) -> Any:
    """Return a value with all its floats, however deep, at four digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return value


def model(device: str) -> str:
    """Return a device's name without its memory: "NVIDIA H100 80GB HBM3" is "NVIDIA H100"."""
    return " ".join(word for word in device.split() if not _MEMORY.fullmatch(word))


def slug(device: str) -> str:
    """Return a device's name as a machine's: "NVIDIA H100 80GB HBM3" is "h100".

    Raises:
        InputError: nothing is left of it.
    """
    found = re.sub(r"[^a-z0-9]+", "-", model(device).lower()).strip("-").removeprefix("nvidia-")
    if not found:
        raise InputError(f"device {device!r}: no name can be made of it")
    return found
