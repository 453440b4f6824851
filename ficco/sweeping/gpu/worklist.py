"""The input of the ranks of a sweep on GPUs, a file in their folder. It does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ficco import registry
from ficco.measuring.layout import Layout
from ficco.sweeping.grid import Grid
from ficco.sweeping.points import Case, Shape

__all__ = ["TODO", "Todo", "layout_of"]

TODO = "todo.pickle"
Runs = dict[int, float]


@dataclass
class Todo:
    """The cases to measure, and the journal's records of them.

    Attributes:
        cases: the unfinished cases, in order.
        grid: the grid, which says how often points run.
        deadline: value of `time.time()` after which nothing is started.
        timeout_s: longest wait within a call, in seconds.
        runs, screens, parts, bad, checked: as in the journal.
        lacking: as in the journal.
        drawn: shape, regime and which ("best" or "worst") of recorded timelines.
        lost: points with known DIL and CIL.
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
    """Return the layout of a rank's tensors for a shape."""
    m = shape.m // shape.world if registry.get(shape.op).flow.splits else shape.m
    return Layout(shape.op, m, shape.n, shape.k, shape.world, shape.dtype)
