"""CuPy's arrays for kernels; see `ficco.kernels.arrays`."""

from __future__ import annotations

from functools import cache
from typing import Any

import cupy
import numpy as np

from ficco.engine.compute import dtype_of


class CupyArrays:
    """See `ficco.kernels.arrays.Arrays`; for one device, which must be current in use."""

    on_gpu = True

    def __init__(self, device: int) -> None:
        self.device: Any = ("cupy", device)
        facts = cupy.cuda.runtime.getDeviceProperties(device)
        self.processors: int | None = int(facts["multiProcessorCount"])
        self.capability = 10 * int(facts["major"]) + int(facts["minor"])
        if cupy.cuda.runtime.is_hip:
            self.capability = 0

    def place(self, numbers: Any, dtype: str) -> Any:
        """See `Arrays.place`. The copy is ordered after the current stream's work."""
        host = np.ascontiguousarray(np.asarray(numbers, dtype_of(dtype)))
        placed = cupy.empty(host.shape, host.dtype)
        placed.set(host)
        cupy.cuda.get_current_stream().synchronize()
        return placed

    def empty(self, count: int, dtype: str) -> Any:
        """See `Arrays.empty`."""
        return cupy.empty(count, dtype_of(dtype))

    def current(self) -> tuple[int, int]:
        """See `Arrays.current`."""
        return int(cupy.cuda.Device().id), int(cupy.cuda.get_current_stream().ptr)

    def capturing(self) -> bool:
        """See `Arrays.capturing`."""
        return bool(cupy.cuda.get_current_stream().is_capturing())


def current_arrays() -> CupyArrays:
    """Return the array library for the current device."""
    return _arrays(int(cupy.cuda.Device().id))


_arrays = cache(CupyArrays)
