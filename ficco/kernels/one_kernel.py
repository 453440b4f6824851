"""Common parts of launches of whole calls: windows, limits of waits, checks of operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ficco.errors import InputError
from ficco.kernels.arrays import dtype_name, stride

__all__ = [
    "ALIGN",
    "Control",
    "Places",
    "check_bias",
    "check_operand",
    "check_rows",
    "power",
    "ranks_as_bits",
    "signed",
]

ALIGN = 16  # bytes of the widest store


class Places(NamedTuple):
    """Addresses of all ranks' windows or mailboxes on this rank's device.

    Attributes:
        words: [copy][rank], addresses of the words, for each of two copies.
        data: [copy][rank], addresses of the data.
        counts: int32 words with a rank's call counts of its mailbox, a tensor or `Address`; None
            for windows.
    """

    words: Sequence[Sequence[int]]
    data: Sequence[Sequence[int]]
    counts: Any = None


class Control(NamedTuple):
    """Inputs and outputs of a launch for its control. Tensors are int32, in device memory.

    Attributes:
        digest: digest of the plan, which peers must have, too.
        stop: one word; while it is not 0, every wait gives up.
        status: one word, which becomes 1 + the place of a word that did not arrive. Both are
            tensors, or objects with data_ptr and dtype.
        timeout_ns: time limit of a program's wait; after a timeout it reads every later word once.
    """

    digest: int
    stop: Any
    status: Any
    timeout_ns: int


def power(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def signed(digest: int) -> int:
    """Return an unsigned 32-bit number as the signed number of the same bits."""
    return digest - (digest >> 31 << 32)


def ranks_as_bits(ranks: Sequence[int]) -> int:
    """Return ranks as bits of a signed 64-bit number."""
    bits = sum(1 << rank for rank in ranks)
    return bits - (bits >> 63 << 64)


def check_operand(name: str, matrix: Any, shape: tuple[int, int], dtype: str) -> None:
    """Check that an operand fits its table.

    Raises:
        InputError: the operand has another shape or dtype.
    """
    if tuple(matrix.shape) != shape:
        raise InputError(f"{name} is {tuple(matrix.shape)}; the table was made for {shape}")
    if dtype_name(matrix) != dtype:
        raise InputError(f"{name} holds {matrix.dtype}; the table was made for {dtype}")


def check_rows(name: str, matrix: Any) -> None:
    """Check that the elements of a matrix's rows are adjacent.

    Raises:
        InputError: the elements are not adjacent.
    """
    if matrix.shape[0] and matrix.shape[1] > 1 and stride(matrix, 1) != 1:
        raise InputError(
            f"{name} has a stride of {stride(matrix, 1)} elements along rows; the elements of a "
            "row must be adjacent (a stride of 1)"
        )


def check_bias(bias: Any, has_bias: bool, n: int, dtype: str, name: str = "bias") -> None:
    """Check that a bias, or None, fits its table.

    Raises:
        InputError: a bias is missing or superfluous, or does not fit.
    """
    if (bias is not None) != has_bias:
        raise InputError(
            f"{name} is {'None' if bias is None else 'given'}; the table was made "
            f"{'with' if has_bias else 'without'} one"
        )
    if bias is not None:
        check_operand(name, bias, (1, n), dtype)
        check_rows(name, bias)
