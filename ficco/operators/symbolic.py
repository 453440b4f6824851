"""Symbolic contents of buffers: the operand rows and columns, or sums of products, in a box.

All coordinates are those of the buffer: element (i, j) of a `Source` box is element
(i + down, j + right) of an operand; a `Sum` box is a sum of terms whose coordinates shift with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

Owner = tuple[int, str]  # rank and buffer of an operand
Key = tuple[object, ...]
Interval = tuple[int, int]


class Source(NamedTuple):
    """Elements of one operand."""

    owner: Owner
    down: int
    right: int


class Sum(NamedTuple):
    """A sum of terms. A term is its key and, for a dot product, the intervals it sums over.

    Keys: ("dot", A, a_along_rows, a_shift, B, b_along_columns, b_shift, b_minus_a): element (i, j)
    sums A[i + a_shift, t] B[t + b_minus_a, j + b_shift] over t. With the flags the
    contraction is along A's rows, or along B's columns, instead. ("row", B, right): element
    (0, j + right) of B. ("one", A, down, right): an element of A.
    """

    terms: tuple[tuple[Key, tuple[Interval, ...]], ...]


Content = Source | Sum


def bags_name(table: str, mode: str) -> str:
    """Return the name, as an operand, of a table's bags that are pooled in a mode of problems."""
    return f"bags of {table}" if mode == "sum" else f"{mode} bags of {table}"


def rows_name(weight: str, tokens_of: int) -> str:
    """Return the name of the rows, by expert, of one rank's tokens times the weights of experts."""
    return f"rows of rank {tokens_of} times {weight}"


def returned_name(weight: str) -> str:
    """Return the name of the products, a row per slot, that the experts of a rank return."""
    return f"rows returned by {weight}"


def combined_name(weight: str) -> str:
    """Return the name of the sums, a row per token, of the rows that a rank's experts return."""
    return f"tokens' sums of rows returned by {weight}"


def dot(
    a: Owner,
    a_along_rows: bool,
    a_shift: int,
    b: Owner,
    b_along_columns: bool,
    b_shift: int,
    b_minus_a: int,
    over: Interval,
) -> Sum:
    """Return one dot product over an interval in A's coordinates."""
    key = ("dot", a, a_along_rows, a_shift, b, b_along_columns, b_shift, b_minus_a)
    return Sum(((key, (over,)),))


def row_of(source: Source) -> Sum:
    """Return a content whose rows all equal one row of an operand."""
    return Sum(((("row", source.owner, source.right), ((0, 1),)),))


def combined(contents: Iterable[Content]) -> Content:
    """Return the sum of contents, in a canonical form."""
    terms: dict[Key, list[Interval]] = {}
    for content in contents:
        if isinstance(content, Source):
            terms.setdefault(("one", *content), []).append((0, 1))
        else:
            for key, intervals in content.terms:
                terms.setdefault(key, []).extend(intervals)
    joined = tuple(sorted((key, _joined(intervals)) for key, intervals in terms.items()))
    if len(joined) == 1 and joined[0][0][0] == "one" and joined[0][1] == ((0, 1),):
        return Source(*joined[0][0][1:])  # type: ignore[arg-type]
    return Sum(joined)


def _joined(intervals: list[Interval]) -> tuple[Interval, ...]:
    """Join adjacent intervals. Overlapping ones, which only a wrong sum has, stay separate."""
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and result[-1][1] == begin:
            result[-1] = (result[-1][0], end)
        else:
            result.append((begin, end))
    return tuple(result)


def shift(content: Content, down: int, right: int) -> Content:
    """Return the content moved up by `down` rows and left by `right` columns."""
    if not (down or right):
        return content
    if isinstance(content, Source):
        return Source(content.owner, content.down + down, content.right + right)
    terms = []
    for key, intervals in content.terms:
        terms.append((_shifted(key, down, right), intervals))
    return Sum(tuple(sorted(terms)))


def _shifted(key: Any, down: int, right: int) -> Key:
    if key[0] == "dot":
        kind, a, along, a_shift, b, across, b_shift, gap = key
        return (kind, a, along, a_shift + down, b, across, b_shift + right, gap)
    if key[0] == "row":
        return ("row", key[1], key[2] + right)
    return ("one", key[1], key[2] + down, key[3] + right)
