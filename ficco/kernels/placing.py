"""Small tables on the device, made while it works.

A copy from the host's ordinary memory ends for the host when all that its stream holds has ended.
So tables are copied on a stream of their own: a call of a new shape then waits for none before it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

__all__ = ["on_device"]


@lru_cache(maxsize=64)
def _stream(device: torch.device) -> Any:
    stream: Any = torch.cuda.Stream
    return stream(device)


def on_device(numbers: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers (a nested list, an array) as a tensor that is there when this returns."""
    host = torch.as_tensor(numbers, dtype=dtype)
    if device.type != "cuda":
        return host
    with torch.cuda.stream(_stream(device)):
        found = host.to(device)
    found.record_stream(torch.cuda.current_stream(device))  # which reads it until it is dropped
    return found
