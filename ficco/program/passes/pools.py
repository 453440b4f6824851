"""Poolings of several tables as launches of ficco's kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ficco.plan import Bag
from ficco.plan.tables import MOST_TABLES
from ficco.program import Pool


def pools_of(bags: Sequence[Bag]) -> list[Pool]:
    """Return poolings, in order, as launches over the tables of the same bags and rows."""
    pools = []
    for _, alike in groupby(bags, key=_rows_of):
        tables = tuple(alike)
        pools += [Pool(tables[i : i + MOST_TABLES]) for i in range(0, len(tables), MOST_TABLES)]
    return pools


def _rows_of(bag: Bag) -> tuple[object, ...]:
    """Return what is equal for all tables of a launch."""
    target = bag.target._replace(col0=0, col1=0)
    return bag.bags.col0, bag.bags.col1, target
