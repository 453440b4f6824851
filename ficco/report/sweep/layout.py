"""The parts of a page: sections of paragraphs, plots, tables and cards."""

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
        href: the first cell's link target on this page.
        data: names and values of data-NAME attributes, which identify the row.
        mark: "" or "loses", which highlights the row; the text says so, too.
    """

    cells: tuple[str, ...]
    href: str = ""
    data: tuple[tuple[str, str], ...] = ()
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        caption: the table's caption.
        columns: titles; a column whose title starts with "<" is left-aligned.
        rows: the rows, in order.
        folded: the table is collapsed under a summary.
        printed: a folded table is expanded in print.
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
    """The plots and tables of one case."""

    ident: str
    title: str
    about: str
    blocks: tuple[Plot | Table, ...]
    wide: bool = False
    kind: str = "card"


Block = Card | Plot | Table


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page with a heading; `stamp` says how its figures were obtained."""

    ident: str
    title: str
    paragraphs: tuple[str, ...]
    blocks: tuple[Block, ...] = ()
    stamp: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a page's contents, which bound its size.

    Attributes:
        cases: rows of tables with a row per case.
        drawn: cases in one plot.
        curves: cases with their own grain curves.
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
        """Return limits of half the size."""
        return Limits(*(max(1, getattr(self, name) // 2) for name in self.__slots__))


def table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Row],
    folded: bool = False,
    printed: bool = True,
) -> Table:
    """Return a table; every row must have one cell per column."""
    for row in rows:
        assert len(row.cells) == len(columns), (caption, row.cells)
    return Table(caption, tuple(columns), tuple(rows), folded, printed)
