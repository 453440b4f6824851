"""A map from the elements of a 2-D buffer to values, with costs by the number of pieces.

Rows are cut into bands, and every band into spans of columns. Neighbours of equal value are joined,
so the representation depends only on the contents, not on the order of writes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V")


class Box(NamedTuple):
    """Rows [r0, r1), columns [c0, c1)."""

    r0: int
    r1: int
    c0: int
    c1: int

    @property
    def area(self) -> int:
        """Elements in the box."""
        return (self.r1 - self.r0) * (self.c1 - self.c0)

    def __str__(self) -> str:
        return f"[{self.r0}:{self.r1}, {self.c0}:{self.c1}]"


class _Band(Generic[V]):
    """Rows [top, bottom) of equal contents: span i has columns [starts[i], ends[i])."""

    __slots__ = ("bottom", "ends", "starts", "top", "values")

    def __init__(self, top: int, bottom: int) -> None:
        self.top, self.bottom = top, bottom
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.values: list[V] = []

    def split(self, row: int) -> _Band[V]:
        """End this band at a row; return the band below it."""
        below: _Band[V] = _Band(row, self.bottom)
        below.starts, below.ends = self.starts.copy(), self.ends.copy()
        below.values = self.values.copy()
        self.bottom = row
        return below

    def like(self, other: _Band[V]) -> bool:
        return (
            self.starts == other.starts and self.ends == other.ends and self.values == other.values
        )

    def put(self, c0: int, c1: int, value: V) -> None:
        """Set columns [c0, c1) to a value."""
        i, j = bisect_right(self.ends, c0), bisect_left(self.starts, c1)
        pieces = [(c0, c1, value)]
        if i < j and self.starts[i] < c0:
            pieces.insert(0, (self.starts[i], c0, self.values[i]))
        elif i and self.ends[i - 1] == c0:
            i -= 1
            pieces.insert(0, (self.starts[i], c0, self.values[i]))
        if i < j and self.ends[j - 1] > c1:
            pieces.append((c1, self.ends[j - 1], self.values[j - 1]))
        elif j < len(self.starts) and self.starts[j] == c1:
            pieces.append((c1, self.ends[j], self.values[j]))
            j += 1
        joined = pieces[:1]
        for piece in pieces[1:]:
            if joined[-1][2] == piece[2]:
                joined[-1] = (joined[-1][0], piece[1], piece[2])
            else:
                joined.append(piece)
        self.starts[i:j] = [start for start, _, _ in joined]
        self.ends[i:j] = [end for _, end, _ in joined]
        self.values[i:j] = [value for _, _, value in joined]


class Tiles(Generic[V]):
    """The map of a buffer's elements to values. Values must be comparable and hashable.

    A box over p pieces is read and written in O(p + log n), plus moves of list entries.
    """

    __slots__ = ("_bands", "_tops")

    def __init__(self) -> None:
        self._bands: list[_Band[V]] = []  # from top to bottom, disjoint
        self._tops: list[int] = []  # of bands

    def read(self, box: Box) -> list[tuple[Box, V]]:
        """Return the parts of a box that have a value: disjoint, each of maximal height."""
        at = max(bisect_right(self._tops, box.r0) - 1, 0)
        parts: list[tuple[Box, V]] = []
        open_at: dict[tuple[int, int, V], int] = {}  # indices in `parts`, of the band above
        above = -1
        for band in self._bands[at : bisect_left(self._tops, box.r1)]:
            if band.bottom <= box.r0:
                continue
            top, bottom = max(band.top, box.r0), min(band.bottom, box.r1)
            i, j = bisect_right(band.ends, box.c0), bisect_left(band.starts, box.c1)
            here: dict[tuple[int, int, V], int] = {}
            for start, end, value in zip(
                band.starts[i:j], band.ends[i:j], band.values[i:j], strict=True
            ):
                span = max(start, box.c0), min(end, box.c1), value
                number = open_at.get(span, -1) if above == top else -1
                if number < 0:
                    here[span] = len(parts)
                    parts.append((Box(top, bottom, span[0], span[1]), value))
                else:
                    here[span] = number
                    parts[number] = (Box(parts[number][0].r0, bottom, span[0], span[1]), value)
            open_at, above = here, bottom
        return parts

    def write(self, box: Box, value: V) -> None:
        """Set all elements of a box to a value."""
        if not self._bands:
            self._bands, self._tops = [_Band(box.r0, box.r1)], [box.r0]
            self._bands[0].put(box.c0, box.c1, value)
            return
        first = self._cut(box.r0)
        last = self._cut(box.r1)
        row, filled = box.r0, []
        for band in [*self._bands[first:last], _Band(box.r1, box.r1)]:
            if row < band.top:
                filled.append(_Band[V](row, band.top))
            if band.top < band.bottom:
                filled.append(band)
            row = band.bottom
        for band in filled:
            band.put(box.c0, box.c1, value)
        above, below = self._bands[max(first - 1, 0) : first], self._bands[last : last + 1]
        joined = _joined([*above, *filled, *below])
        begin, end = first - len(above), last + len(below)
        self._bands[begin:end] = joined
        self._tops[begin:end] = [band.top for band in joined]

    def _cut(self, row: int) -> int:
        """Split the band that spans a row; return the number of the first band at or below it."""
        at = bisect_left(self._tops, row)
        if at and self._bands[at - 1].bottom > row:
            self._bands.insert(at, self._bands[at - 1].split(row))
            self._tops.insert(at, row)
        return at


def _joined(bands: list[_Band[V]]) -> list[_Band[V]]:
    joined = bands[:1]
    for band in bands[1:]:
        if joined[-1].bottom == band.top and joined[-1].like(band):
            joined[-1].bottom = band.bottom
        else:
            joined.append(band)
    return joined
