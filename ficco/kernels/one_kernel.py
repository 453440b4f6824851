"""What launches of whole calls share: windows, what ends their waits, checks of operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ficco.errors import InputError
from ficco.kernels.arrays import dtype_name, stride

__all__ = [
    "ALIGN",
    "Control",
    "Places",
    "check_operand",
    "check_rows",
    "power",
    "ranks_as_bits",
    "signed",
]

ALIGN = 16  # bytes of the widest store


class Places(NamedTuple):
    """Addresses of all ranks' windows or mailboxes, as this rank's device sees them.

    Attributes:
        words: [copy][rank], where words begin, for each of two copies.
        data: [copy][rank], where data begin.
        counts: int32 words by which a rank counts calls on its mailbox, a tensor or `Address`; None
            for windows.
    """

    words: Sequence[Sequence[int]]
    data: Sequence[Sequence[int]]
    counts: Any = None


class Control(NamedTuple):
    """What a launch is told from outside, and tells. Tensors are int32, in device memory.

    Attributes:
        digest: of the plan, which peers must have, too.
        stop: one word; while it is not 0, every wait is given up.
        status: one word, which becomes 1 + the place of a word that was given up. Both are
            tensors, or what has their data_ptr and dtype.
        timeout_ns: how long a program waits before it gives up by itself; it looks at every later
            word once.
    """

    digest: int
    stop: Any
    status: Any
    timeout_ns: int


def power(size: int) -> int:
    """Return the least power of two that is not less."""
    return 1 << max(size - 1, 0).bit_length()


def signed(digest: int) -> int:
    """Return a number of 32 bits as kernels take it."""
    return digest - (digest >> 31 << 32)


def ranks_as_bits(ranks: Sequence[int]) -> int:
    """Return ranks as bits of a signed number of 64."""
    bits = sum(1 << rank for rank in ranks)
    return bits - (bits >> 63 << 64)


def check_operand(name: str, matrix: Any, shape: tuple[int, int], dtype: str) -> None:
    """Refuse an operand that a table was not made for.

    Raises:
        InputError: it has another shape or dtype.
    """
    if tuple(matrix.shape) != shape:
        raise InputError(f"{name} is {tuple(matrix.shape)}; the table was made for {shape}")
    if dtype_name(matrix) != dtype:
        raise InputError(f"{name} holds {matrix.dtype}; the table was made for {dtype}")


def check_rows(name: str, matrix: Any) -> None:
    """Refuse a matrix whose rows' elements are not neighbours.

    Raises:
        InputError: they are not.
    """
    if matrix.shape[0] and matrix.shape[1] > 1 and stride(matrix, 1) != 1:
        raise InputError(
            f"{name} has a stride of {stride(matrix, 1)} elements along rows; the elements of a "
            "row must be adjacent (a stride of 1)"
        )
