"""PyTorch tensors for kernels; see `ficco.kernels.arrays`.

A copy from pageable host memory blocks the host until all earlier work of its stream has ended. So
tables are copied on a separate stream, and a call of a new shape does not wait for earlier calls.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ficco.core.private.torch_core import current_device, current_stream


@lru_cache(maxsize=64)
def _stream(device: torch.device) -> Any:
    stream: Any = torch.cuda.Stream
    return stream(device)


class TorchArrays:
    """See `ficco.kernels.arrays.Arrays`; a CPU device is for Triton's interpreter."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.processors, self.capability = None, 0
        if self.on_gpu:
            facts = torch.cuda.get_device_properties(device)
            self.processors = facts.multi_processor_count
            if torch.version.hip is None:
                self.capability = 10 * facts.major + facts.minor

    def place(self, numbers: Any, dtype: str) -> torch.Tensor:
        """See `Arrays.place`."""
        host = torch.as_tensor(numbers, dtype=getattr(torch, dtype))
        if not self.on_gpu:
            return host
        with torch.cuda.stream(_stream(self.device)):
            placed = host.to(self.device)
        placed.record_stream(torch.cuda.current_stream(self.device))  # the stream that reads it
        return placed

    def empty(self, count: int, dtype: str) -> torch.Tensor:
        """See `Arrays.empty`."""
        return torch.empty(count, dtype=getattr(torch, dtype), device=self.device)

    def current(self) -> tuple[int, int]:
        """See `Arrays.current`."""
        device = current_device()
        return int(device), int(current_stream(device))

    def capturing(self) -> bool:
        """See `Arrays.capturing`."""
        return self.on_gpu and torch.cuda.is_current_stream_capturing()
