"""The proof of plans with many copies: its work grows with their number, and it finds one fault."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import pytest
from cases import plan_of
from edits import dropped, replaced, steps_of, with_steps

from ficco.plan import Plan, Region, Step
from ficco.verifier import verify

WAYS = ("rows in order", "rows shuffled", "tiles shuffled", "one step")


def pieces_of(step: Step, number: int, way: str) -> list[Step]:
    """Cut a copy into about so many, or give one step as many regions."""
    source, target = step.reads[0], step.writes[0]
    across = int(number**0.5) if way == "tiles shuffled" else 1
    down = number // across

    def cut(region: Region, i: int, j: int) -> Region:
        rows = [region.row0 + region.rows * at // down for at in (i, i + 1)]
        cols = [region.col0 + region.cols * at // across for at in (j, j + 1)]
        return region._replace(row0=rows[0], row1=rows[1], col0=cols[0], col1=cols[1])

    pairs = [(cut(source, i, j), cut(target, i, j)) for i in range(down) for j in range(across)]
    if way.endswith("shuffled"):
        random.Random(7).shuffle(pairs)
    if way == "one step":
        return [step._replace(reads=tuple(a for a, _ in pairs), writes=tuple(b for _, b in pairs))]
    return [
        step._replace(id=f"{step.id}.{i}", reads=(a,), writes=(b,))
        for i, (a, b) in enumerate(pairs)
    ]


def plan_with(number: int, way: str) -> Plan:
    """Return the plan of two ranks, each of which sends its shard by so many copies."""
    plan = plan_of("shard_p2p", 2, 2 * number, 4, 100)
    for rank in range(2):
        steps = steps_of(plan, rank)
        at = next(i for i, step in enumerate(steps) if step.kind == "copy")
        plan = with_steps(plan, rank, replaced(steps, at, pieces_of(steps[at], number, way)))
    return plan


def lines_run(plan: Plan) -> int:
    """Return how many lines of Python a proof runs, which does not depend on the machine."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = verify(plan)
    finally:
        sys.settrace(before)
    assert not found
    return lines


@pytest.mark.parametrize("way", WAYS)
def test_four_times_the_copies_are_about_four_times_the_work(way: str) -> None:
    few, many = (lines_run(plan_with(number, way)) for number in (500, 2000))
    assert many < 6 * few, f"{few} lines for 500 copies a rank, {many} for 2,000"


@pytest.mark.parametrize("way", WAYS[:3])
def test_one_fault_among_many_copies_is_found(way: str) -> None:
    plan = plan_with(900, way)
    steps = steps_of(plan, 1)
    copies = [i for i, step in enumerate(steps) if step.kind == "copy"]
    at = copies[len(copies) // 2]
    found = verify(with_steps(plan, 1, dropped(steps, at)))
    assert [violation.rule for violation in found] == ["value"]

    step = steps[at]
    for by in (-1, 1):
        source = step.reads[0]._replace(
            col0=step.reads[0].col0 + (by > 0), col1=step.reads[0].col1 - (by < 0)
        )
        target = step.writes[0]._replace(col1=step.writes[0].col0 + source.cols)
        wrong = step._replace(reads=(source,), writes=(target,))
        changed = [*steps[:at], wrong, *steps[at + 1 :]]
        assert {v.rule for v in verify(with_steps(plan, 1, changed))} == {"value"}

    signal = next(i for i in range(at, len(steps)) if steps[i].kind == "raise")
    late = [*steps[:at], *steps[at + 1 : signal + 1], step, *steps[signal + 1 :]]
    assert "race" in {v.rule for v in verify(with_steps(plan, 1, late))}


def test_one_step_that_writes_an_element_twice_among_many_regions_is_refused() -> None:
    plan = plan_with(900, "one step")
    steps = steps_of(plan, 0)
    at = next(i for i, step in enumerate(steps) if step.kind == "copy")
    reads, writes = steps[at].reads, list(steps[at].writes)
    writes[700] = writes[300]
    steps[at] = steps[at]._replace(reads=reads, writes=tuple(writes))
    found = verify(with_steps(plan, 0, steps))
    assert [v.rule for v in found] == ["form"]
    assert str(writes[300]) in found[0].message
