"""Parts of a gated GEMM, as numbers that engines pass. Neither torch nor Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Arrived", "GatedPart", "WindowRelease"]


class Arrived(NamedTuple):
    """A peer's term of a part, in the peer's dtype, with the part's rows and columns.

    Attributes:
        row: its first row in `recv`. Its columns are the part's.
        word: index of the word to wait for, or -1.
    """

    row: int
    word: int = -1


class GatedPart(NamedTuple):
    """Rows of the product that become available, or are needed, at one moment.

    Attributes:
        source: the matrix of its rows of a, "own" or "window".
        a_row: its first row there.
        c_row: its first row in its target.
        rows: number of rows, 0 or more.
        word: index of the word to wait for, or -1; own rows never wait.
        signal: index of the word that is raised when the part is stored, or -1. A part without
            elements raises none.
        target: "c" or "partial".
        col: its first column, in b and in its target.
        cols: number of columns; None: all from the first.
        terms: the terms of its sum, in the order of ranks, with None in place of the own product.
            Empty if it is not summed.
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
    """The release of the window by the last program of a launch, when all have ended.

    Attributes:
        cleared: indices of own words that are set to 0.
        raised: index of the word that is then raised at every peer, to 1.
        peers: ranks of the peers; if empty, nothing is done.
        homes: [copy][rank], device addresses of the ranks' words.
    """

    cleared: tuple[int, ...]
    raised: int
    peers: tuple[int, ...]
    homes: Sequence[Sequence[int]] = ()
