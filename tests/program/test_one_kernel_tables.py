"""Changed plans of kernels that run a whole call: refused, or the table says what they do."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from cases import MESH

from ficco.core.errors import PlanError
from ficco.lowering import lower
from ficco.lowering.one_kernel_steps import plan_of
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan import RankPlan, Step
from ficco.plan.schedule import Schedule
from ficco.plan.tables import OneKernelTable
from ficco.program.passes.one_kernel_tables import table_of

_BIASED = (Output((40,) * 3, bias=True),)
_SUMMED = Problem("matmul_all_reduce", 3, (2, 0, 3), 9, _BIASED, "bfloat16", depths=(4, 0, 5))
_KEPT = (Output((9, 0, 4)), Output((40,) * 3, "", "gathered"), Output((5,) * 3, "w1", bias=True))
_POOLED = Problem(
    "embedding_all_to_all", 3, (2, 0, 3), 1, (Output((8,) * 3),), tables=((5,), (), (4, 3)),
    lookups=((7,), (), (6, 2)), modes=(("mean",), (), ("sum", "weighted")),
)  # fmt: skip
PROBLEMS = {
    "one_shot_sm": _SUMMED,
    "two_shot_sm": _SUMMED,
    "one_shot_pull": replace(_SUMMED, outputs=(Output((40,) * 3),)),
    "two_shot_pull": _SUMMED,
    "gather_sm": Problem("all_gather_matmul", 3, (2, 0, 3), 40, _KEPT),
    "pool_sm": _POOLED,
}
_ROWS = {"op": "all_to_all_matmul", "world": 3, "rows": (3, 0, 6), "k": 4,
         "splits": ((0, 1, 2), (0, 0, 0), (3, 3, 0))}  # fmt: skip
SENDING = {
    "multiply": Problem(outputs=(Output((5,) * 3, bias=True),), **_ROWS),
    "move": Problem(outputs=(Output((5,) * 3),), **(_ROWS | {"op": "matmul_all_to_all"})),
    "sum": replace(_SUMMED, op="matmul_reduce_scatter"),
    "share": replace(_SUMMED, rows=(7, 0, 1)),
    "kept": Problem("all_gather_matmul", 3, (2, 0, 7), 40, _KEPT),
    "no columns": Problem("all_gather_matmul", 3, (2, 1, 7), 4, _KEPT[:1]),
}
_WORDS = ("x", "y0", "w", "sm", "dma", "data", "free", "copy", "reduce", "wait", "mean", "recv")


def _bumped(value: Any, rng: random.Random) -> Any:
    """Change one number, word or truth of a field, or drop, repeat or exchange its entries."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((0, -value, value + 1, value - 1, value + 10**6))
    if isinstance(value, str):
        return rng.choice(_WORDS)
    if not value:
        return value
    at = rng.randrange(len(value))
    entries = [*value[:at], _bumped(value[at], rng), *value[at + 1 :]]
    if hasattr(value, "_make"):
        return value._make(entries)
    fewer, more = (*value[:at], *value[at + 1 :]), (*value, value[at])
    return rng.choice((tuple(entries), tuple(entries), fewer, more, value[::-1]))


def _content(plan: RankPlan) -> list[Step]:
    steps = [step._replace(signals=tuple(sorted(step.signals))) for step in plan.steps]
    return [step._replace(id="", lane="") for step in steps]


MOVED = {f"{name} by one kernel": each for name, each in SENDING.items() if name != "share"}
CASES = [
    *PROBLEMS.items(),
    *[("push_sm", problem) for problem in SENDING.values()],
    *[("whole_sm", problem) for problem in MOVED.values()],
]
_IDS = [*PROBLEMS, *SENDING, *MOVED]


@pytest.mark.parametrize(("name", "problem"), CASES, ids=_IDS)
def test_tables_of_plans_make_the_plans(name: str, problem: Problem) -> None:
    for grain in (1, 2, 5):
        plan = lower(problem, replace(Schedule.named(name), grain=grain).resolve(3, MESH))
        for entry in plan.ranks:
            assert plan_of(table_of(entry), entry.buffers) == entry


@pytest.mark.parametrize(("name", "problem"), CASES, ids=_IDS)
def test_changed_plans_are_refused_or_described(name: str, problem: Problem) -> None:
    rng, refused = random.Random(name), 0
    plan = lower(problem, replace(Schedule.named(name), grain=3).resolve(3, MESH))
    for _ in range(600):
        entry = rng.choice(plan.ranks)
        steps = list(entry.steps)
        at = rng.randrange(len(steps))
        field = rng.choice([field for field in Step._fields if getattr(steps[at], field) != ""])
        steps[at] = steps[at]._replace(**{field: _bumped(getattr(steps[at], field), rng)})
        changed = entry._replace(steps=tuple(steps))
        try:
            table = table_of(changed)
        except PlanError:
            refused += 1
            continue
        if isinstance(table, OneKernelTable):
            table = table._replace(made=False)
        assert _content(plan_of(table, entry.buffers)) == _content(changed)
    assert refused > 200
