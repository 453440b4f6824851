"""Parts of a gated GEMM: what engines say of a launch, in numbers. Neither torch nor Triton."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GatedPart"]


class GatedPart(NamedTuple):
    """Rows of the product that can be had at one moment.

    Attributes:
        source: where its rows of a lie, "own" or "window".
        a_row: the first of them there.
        c_row: the first of its rows in c.
        rows: how many, 0 or more.
        word: index of the word to wait for, or -1; own rows wait for nothing.
    """

    source: str
    a_row: int
    c_row: int
    rows: int
    word: int = -1
