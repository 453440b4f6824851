"""Evaluation of times: latencies, rates, least squares, names. It does not access the machine."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from ficco.core.errors import InputError

Points = list[tuple[int, float]]

_MEMORY = re.compile(r"\d+GB|HBM\w*", re.IGNORECASE)

_STEADY, _TRIES = 1.1, 4  # a median is trusted up to _STEADY times the least time
_NOISE = 0.1  # a rate is trusted if the latency is at most this fraction of the time
_MESH = 0.7  # fraction of n times one peer's rate from which on pairs have their own links


def steady(measure: Callable[[], Sequence[float]]) -> float:
    """Return the median of times with a small spread.

    A host that stalls while a GPU waits for it only lengthens the times. If the median is far above
    the least time, the measurement is repeated, at most _TRIES times; the least median counts.
    """
    least = math.inf
    for _ in range(_TRIES):
        times = measure()
        middle = statistics.median(times)
        least = min(least, middle)
        if middle <= _STEADY * min(times):
            break
    return least


def gbps(size: float, us: float) -> float:
    """Return a rate in GB/s."""
    return size / (us * 1e3)


def latency_and_rates(times: Sequence[tuple[int, float]]) -> tuple[float, Points]:
    """Return a transfer's latency in us, and its rates without the latency, by size.

    Args:
        times: (bytes, us of one transfer), by rising size; the smallest gives the latency.
    """
    size, us = times[0]
    best = max(size / us for size, us in times)
    latency = max(0.0, us - size / best)
    return latency, net_rates([(size, size, us) for size, us in times], latency)


def net_rates(times: Sequence[tuple[int, int, float]], latency_us: float) -> Points:
    """Return rates of transfers without their latency.

    The rate of a transfer that is nearly all latency is noise; it is limited to the best trusted
    rate.

    Args:
        times: (the point's coordinate, bytes, us of one transfer).
        latency_us: the latency of every transfer.
    """
    trusted = [(size, us - latency_us) for _, size, us in times if latency_us <= _NOISE * us]
    most = max(gbps(size, us) for size, us in trusted or [(s, us) for _, s, us in times])
    return [
        (at, min(most, gbps(size, us - latency_us)) if us > latency_us else most)
        for at, size, us in times
    ]


def links_per(out_gbps: Sequence[tuple[int, float]]) -> str:
    """Return whether a link's rate is per "pair" or "port", from (peers at once, GB/s to all)."""
    if len(out_gbps) < 2:
        return "port"
    (_, one), (peers, together) = out_gbps[0], out_gbps[-1]
    return "pair" if together >= _MESH * peers * one else "port"


def least_squares(
    rows: Sequence[Sequence[float]], values: Sequence[float]
) -> tuple[list[float], float]:
    """Return the non-negative x for which rows . x is nearest to the values.

    There are few unknowns, so every set of unknowns that are 0 is tried.

    Returns:
        x, and the root of the mean squared error.
    """
    matrix, target = np.array(rows, float), np.array(values, float)
    count = matrix.shape[1]
    best, least = np.zeros(count), float(np.sum(target**2))
    for size in range(1, count + 1):
        for support in combinations(range(count), size):
            solution = np.linalg.lstsq(matrix[:, support], target, rcond=None)[0]
            error = float(np.sum((matrix[:, support] @ solution - target) ** 2))
            if (solution >= 0).all() and error < least:
                best, least = np.zeros(count), error
                best[list(support)] = solution
    return [float(value) for value in best], float(np.sqrt(least / len(target)))


def slower(beside_us: float, alone_us: float) -> float:
    """Return the slowdown of work that runs beside other work, as a factor of 1 or more."""
    return max(1.0, beside_us / alone_us)


def rounded(value: Any) -> Any:
    """Return a value with all nested floats rounded to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value


def model(device: str) -> str:
    """Return a device's name without its memory: "NVIDIA H100 80GB HBM3" is "NVIDIA H100"."""
    return " ".join(word for word in device.split() if not _MEMORY.fullmatch(word))


def slug(device: str) -> str:
    """Return a machine's name from a device's: "NVIDIA H100 80GB HBM3" is "h100".

    Raises:
        InputError: the device's name contains no usable characters.
    """
    name = re.sub(r"[^a-z0-9]+", "-", model(device).lower()).strip("-").removeprefix("nvidia-")
    if not name:
        raise InputError(f"device {device!r}: its name gives no machine name")
    return name
