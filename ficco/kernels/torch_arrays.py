"""PyTorch's tensors as kernels need them; see `ficco.kernels.arrays`.

A copy from the host's ordinary memory ends for the host when all that its stream holds has ended.
So tables are copied on a stream of their own: a call of a new shape then waits for none before it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ficco.private.torch_core import current_device, current_stream

__all__ = ["TorchArrays"]


@lru_cache(maxsize=64)
def _stream(device: torch.device) -> Any:
    stream: Any = torch.cuda.Stream
    return stream(device)


class TorchArrays:
    """See `ficco.kernels.arrays.Arrays`; on the CPU, for Triton's interpreter."""

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
            found = host.to(self.device)
        found.record_stream(torch.cuda.current_stream(self.device))  # reads it until it is dropped
        return found

    def empty(self, count: int, dtype: str) -> torch.Tensor:
        """See `Arrays.empty`."""
        return torch.empty(count, dtype=getattr(torch, dtype), device=self.device)

    def current(self) -> tuple[int, int]:
        """See `Arrays.current`."""
        device = current_device()
        return int(device), int(current_stream(device))
