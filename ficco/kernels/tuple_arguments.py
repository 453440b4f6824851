"""Elements of tuples that kernels take as arguments. Device code only.

Triton's own launch passes an element that is 1 as a constant, and small numbers as int32.
"""

from __future__ import annotations

from typing import Any  # noqa: F401 - of a comment; Triton reads no annotation

import triton
import triton.language as tl

__all__ = ["element", "unpacked"]


@triton.jit
def element(values, number):
    """Return the element of a tuple of pointers or numbers at a position, as int64."""
    chosen = tl.cast(values[0], tl.int64)
    for i in tl.static_range(1, len(values)):
        chosen = tl.where(number == i, tl.cast(values[i], tl.int64), chosen)
    return chosen


@triton.jit
def unpacked(values, dtype: tl.constexpr):
    """Return a tuple of numbers as numbers of this type."""
    found = ()  # type: Any
    for i in tl.static_range(len(values)):
        found = found + (tl.cast(values[i], dtype),)  # noqa: RUF005 - Triton's way
    return found
