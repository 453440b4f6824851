"""What a page is put together from: sections of paragraphs, plots, tables and cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

__all__ = ["Block", "Card", "Limits", "Plot", "Row", "Section", "Table", "table"]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table.

    Attributes:
        cells: texts; the first one names the row.
        href: where the first one leads, on this page.
        data: names and values by which others find the row again, as data-NAME.
        mark: "" or "loses": a row that stands out, which its text says, too.
    """

    cells: tuple[str, ...]
    href: str = ""
    data: tuple[tuple[str, str], ...] = ()
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        caption: what it shows.
        columns: titles; one that begins with "<" is aligned to the left.
        rows: what it shows, in order.
        folded: it stands behind a summary that opens it.
        printed: a folded one is open on paper.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    folded: bool = False
    printed: bool = True
    kind: str = "table"


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot with its caption, and its figures as a table."""

    svg: Markup
    caption: str
    figures: Table | None = None
    kind: str = "plot"


@dataclass(frozen=True, slots=True)
class Card:
    """What belongs to one case."""

    ident: str
    title: str
    about: str
    blocks: tuple[Plot | Table, ...]
    wide: bool = False
    kind: str = "card"


Block = Card | Plot | Table


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page with a heading; `stamp`: how its figures came to be."""

    ident: str
    title: str
    paragraphs: tuple[str, ...]
    blocks: tuple[Block, ...] = ()
    stamp: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of each kind a page shows, so that it stays small enough to open anywhere.

    Attributes:
        cases: rows of tables with a row a case.
        drawn: cases in one plot.
        curves: cases with grain curves of their own.
        timelines: cases with timelines.
        points: rows in tables of points, over all cases.
        marks: single points in one plot.
        bad: bad points.
    """

    cases: int = 1000
    drawn: int = 40
    curves: int = 24
    timelines: int = 8
    points: int = 6000
    marks: int = 4000
    bad: int = 400

    def halved(self) -> Limits:
        """Return half as much of everything."""
        return Limits(*(max(1, getattr(self, name) // 2) for name in self.__slots__))


def table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Row],
    folded: bool = False,
    printed: bool = True,
) -> Table:
    """Return a table, every row of which has a cell a column."""
    for row in rows:
        assert len(row.cells) == len(columns), (caption, row.cells)
    return Table(caption, tuple(columns), tuple(rows), folded, printed)
