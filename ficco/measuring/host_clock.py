"""Time calls on the host's clock; without torch."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["host_us"]


def host_us(call: Callable[[], object], calls: int) -> float:
    """Return the mean time of calls back to back, in us; it does not wait for a device."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - begin) / calls
