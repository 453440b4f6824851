"""Counts lowerings: which plans this process makes, and how often."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from ficco import lowering
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

Lowerings = Counter[tuple[Problem, Schedule, int]]


def count_lowerings(replace: Callable[[Any, str, Any], None] = setattr) -> Lowerings:
    """Return a counter of lowerings from now on, by problem, schedule and rank.

    Args:
        replace: sets an attribute of a module: the function, in every module that has it.
    """
    counted: Lowerings = Counter()
    original = lowering.lower_rank

    def lower_rank(problem: Problem, schedule: Schedule, rank: int) -> Any:
        counted[problem, schedule, rank] += 1
        return original(problem, schedule, rank)

    for name, module in list(sys.modules.items()):
        if name.startswith("ficco") and getattr(module, "lower_rank", None) is original:
            replace(module, "lower_rank", lower_rank)
    return counted
