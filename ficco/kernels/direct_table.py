"""What the direct kernel reads of a plan. Numbers only: neither torch nor Triton is needed here."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DirectChunk", "DirectTable"]


class DirectChunk(NamedTuple):
    """Columns [begin, end) of the product.

    Attributes:
        begin, end: columns.
        partial: index among `data` words of a writer of that behind its products.
        total: the same of that behind its sums; where none are passed on, it is not used.
    """

    begin: int
    end: int
    partial: int
    total: int


class DirectTable(NamedTuple):
    """One rank's part of a matmul_all_reduce, as one launch runs it.

    Attributes:
        rank, world: of the plan.
        m, n, k: rows and columns of y, and the depth that this rank multiplies.
        dtype: of all operands.
        bias: whether one is added.
        twice: whether sums are passed on by those who made them.
        chunks: in the order in which they are made; none is empty.
        own_row, own_rows: rows of y that this rank adds up.
        slot_rows: rows that the window has for one rank's products.
        rows_to: (rank, row of its window of products) for every row that is made; for all rows
            once, or, if not `twice`, for all rows and every rank, the own one last.
        targets: ranks, but this one, that get products.
        owners: ranks, but this one, that pass sums on.
        landing: byte offset of the window of products in a window copy.
        kept: the same of the window of sums, if `twice`.
    """

    rank: int
    world: int
    m: int
    n: int
    k: int
    dtype: str
    bias: bool
    twice: bool
    chunks: tuple[DirectChunk, ...]
    own_row: int
    own_rows: int
    slot_rows: int
    rows_to: tuple[tuple[int, int], ...]
    targets: tuple[int, ...]
    owners: tuple[int, ...]
    landing: int
    kept: int
