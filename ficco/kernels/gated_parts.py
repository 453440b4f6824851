"""Parts of a gated GEMM: what engines say of a launch, in numbers. Neither torch nor Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Arrived", "GatedPart", "WindowRelease"]


class Arrived(NamedTuple):
    """What a peer has made of a part, in its dtype: as many rows and columns.

    Attributes:
        row: the first of its rows in `recv`. Its columns are the part's.
        word: index of the word to wait for, or -1.
    """

    row: int
    word: int = -1


class GatedPart(NamedTuple):
    """Rows of the product that can be had, or are wanted, at one moment.

    Attributes:
        source: where its rows of a lie, "own" or "window".
        a_row: the first of them there.
        c_row: the first of its rows in its target.
        rows: how many, 0 or more.
        word: index of the word to wait for, or -1; own rows wait for nothing.
        signal: index of the word that is raised when all of it is stored, or -1. A part without
            elements raises none.
        target: where it goes, "c" or "partial".
        col: its first column, in b and in its target.
        cols: how many; None for all behind the first.
        terms: what it is summed with: every rank's part in the order of ranks, and None in the own
            one's place. Empty where it is not summed.
    """

    source: str
    a_row: int
    c_row: int
    rows: int
    word: int = -1
    signal: int = -1
    target: str = "c"
    col: int = 0
    cols: int | None = None
    terms: tuple[Arrived | None, ...] = ()


class WindowRelease(NamedTuple):
    """What the last program of a launch does when all have ended.

    Attributes:
        cleared: indices of own words, which are set to 0.
        raised: index of the word that is raised at every peer, to 1, behind these.
        peers: their ranks; without any, nothing is done.
        homes: [copy][rank], where words of ranks begin, as the device sees them.
    """

    cleared: tuple[int, ...]
    raised: int
    peers: tuple[int, ...]
    homes: Sequence[Sequence[int]] = ()
