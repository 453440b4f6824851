"""What the ranks of a sweep on GPUs are told, in a file of their folder. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ficco import registry
from ficco.sweeping.gpu.layout import Layout
from ficco.sweeping.grid import Grid
from ficco.sweeping.points import Case, Shape

__all__ = ["TODO", "Todo", "layout_of"]

TODO = "todo.pickle"
Runs = dict[int, float]


@dataclass
class Todo:
    """What ranks are told: the cases, and what is known of them.

    Attributes:
        cases: in order, those that have not ended.
        grid: how often points run.
        deadline: of `time.time()`, after which nothing is begun.
        timeout_s: how long a wait within a call may last.
        runs, screens, parts, bad, checked: as in the journal.
        lacking: as in the journal.
        drawn: shape, regime and which of the timelines that there are.
        lost: points of which DIL and CIL are known.
    """

    cases: list[Case]
    grid: Grid
    deadline: float
    timeout_s: float
    runs: dict[str, Runs] = field(default_factory=dict)
    screens: dict[str, Runs] = field(default_factory=dict)
    parts: dict[str, dict[str, Runs]] = field(default_factory=dict)
    bad: dict[str, Any] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)
    lacking: dict[str, dict[str, str]] = field(default_factory=dict)
    drawn: set[tuple[str, str, str]] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)


def layout_of(shape: Shape) -> Layout:
    """Return what a rank holds of a shape."""
    m = shape.m // shape.world if registry.get(shape.op).flow.splits else shape.m
    return Layout(shape.op, m, shape.n, shape.k, shape.world, shape.dtype)
