"""Random matrices, cut from a large pool in turn, so that the next matrix is in no cache."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Pool", "room"]

_MOST = 1_200_000_000  # elements of 16 bits in a pool
_APART = 128  # matrices start at multiples of this many elements


def room() -> int:
    """Return the largest pool on the current GPU, in 16-bit elements; equal on equal GPUs."""
    _, total = torch.cuda.mem_get_info()
    return int(min(_MOST, total // 20))


class Pool:
    """Random numbers for matrices.

    A pool is much larger than a cache, so the cache does not hold a matrix when it is used again.

    Args:
        elements: number of elements of 16 bits.
        device: the device of the pool.
    """

    def __init__(self, elements: int, device: torch.device) -> None:
        self._numbers = torch.empty(elements, dtype=torch.bfloat16, device=device).normal_()
        self._next = 0

    def take(self, rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        """Return the next matrix; when the pool is used up, its start is reused."""
        size = rows * cols * dtype.itemsize // self._numbers.itemsize
        if self._next + size > self._numbers.numel():
            self._next = 0
        numbers = self._numbers[self._next : self._next + size]
        self._next += -(-size // _APART) * _APART
        return numbers.view(dtype).view(rows, cols)
