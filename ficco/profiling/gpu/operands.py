"""Matrices of random numbers, cut from a pool by turns, so that no cache holds the next one."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Pool", "room"]

_MOST = 1_200_000_000  # elements of 16 bits in a pool
_APART = 128  # elements that matrices begin at multiples of


def room() -> int:
    """Return how many 16-bit elements a pool may have on the current GPU, equal on equal GPUs."""
    _, total = torch.cuda.mem_get_info()
    return int(min(_MOST, total // 20))


class Pool:
    """Random numbers that matrices are cut from.

    A pool is much larger than a cache, so matrices that were cut long ago are not in it any more.

    Args:
        elements: of 16 bits.
        device: where they lie.
    """

    def __init__(self, elements: int, device: torch.device) -> None:
        self._numbers = torch.empty(elements, dtype=torch.bfloat16, device=device).normal_()
        self._next = 0

    def take(self, rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        """Return a matrix that earlier ones may share memory with, if the pool is used up."""
        size = rows * cols * dtype.itemsize // self._numbers.itemsize
        if self._next + size > self._numbers.numel():
            self._next = 0
        found = self._numbers[self._next : self._next + size]
        self._next += -(-size // _APART) * _APART
        return found.view(dtype).view(rows, cols)
