"""What PyTorch does in `serial` to add up the rows that a rank's experts return, for each token."""

from __future__ import annotations

__all__ = ["bytes_of_sums", "calls_of_sums"]


def calls_of_sums(topk: int) -> int:
    """Return the calls of PyTorch that store rows at slots, and add up those of each token."""
    return 12 + 2 * topk


def bytes_of_sums(slots: int, n: int, item: int) -> int:
    """Return the bytes that these calls move: each slot once in its dtype, and sums in float32."""
    return slots * n * (3 * item + 8)
