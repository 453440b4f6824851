"""Plans of collectives and whole GEMMs: proved, interpreted, compiled, and wrong ones rejected."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from cases import collective_plans, plan_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from interpreter import Wrong, interpret

from ficco.core.errors import EngineError, ScheduleError
from ficco.core.machine import COLLECTIVES
from ficco.lowering import lower
from ficco.operators import OPERATORS
from ficco.operators.problem import Problem
from ficco.plan import Plan, Region, Step
from ficco.plan.plan_json import dumps
from ficco.plan.schedule import Schedule
from ficco.program import Copy, Exchange, Launch
from ficco.program.passes import compile_plan
from ficco.program.passes.readback import read_back_plan
from ficco.program.target import HOST, LIBRARY, cuda_target
from ficco.verifier import verify

MORE = int(os.environ.get("FICCO_EXAMPLES", "1"))
SERIAL = Schedule(name="serial", compute="whole", transport="collective")


def goes_wrong(plan: Plan, seed: int) -> str | None:
    try:
        interpret(json.loads(dumps(plan)), seed, calls=2, in_order=False)
    except Wrong as wrong:
        return str(wrong)
    return None


@pytest.mark.parametrize("op", OPERATORS)
def test_plans_and_programs_are_right(op: str) -> None:
    @settings(max_examples=MORE * 40)
    @given(collective_plans(op), st.integers(0, 2**20))
    def run(plan: Plan, seed: int) -> None:
        assert not verify(plan)
        assert goes_wrong(plan, seed) is None
        programs = [compile_plan(entry, LIBRARY) for entry in plan.ranks]
        back = read_back_plan(plan, programs)
        assert not verify(back)
        assert goes_wrong(back, seed) is None
        for entry, program in zip(plan.ranks, programs, strict=True):
            exchanges = [e for e in program.entries if isinstance(e, Exchange)]
            assert len(exchanges) == (plan.problem.world > 1)
            assert all(isinstance(e, (Exchange, Launch, Copy)) for e in program.entries)
            assert {step.lane for step in entry.steps} <= {"compute"}

    run()


def _other_collective(step: Step, number: int) -> Step:
    names = [name for name in COLLECTIVES if name != step.collective]
    return step._replace(collective=names[number % len(names)])


def _swapped(regions: tuple[Region, ...], number: int) -> tuple[Region, ...]:
    if len(regions) < 2:
        return regions
    i = number % (len(regions) - 1)
    swapped = list(regions)
    swapped[i], swapped[i + 1] = swapped[i + 1], swapped[i]
    return tuple(swapped)


def _shifted(regions: tuple[Region, ...], number: int) -> tuple[Region, ...]:
    if not regions:
        return regions
    i = number % len(regions)
    moved = regions[i]._replace(row0=regions[i].row0 + 1, row1=regions[i].row1 + 1)
    return (*regions[:i], moved, *regions[i + 1 :])


EDITS: dict[str, Callable[[Step, int], Step | None]] = {
    "left out": lambda step, number: None,
    "other collective": _other_collective,
    "reads swapped": lambda step, n: step._replace(reads=_swapped(step.reads, n)),
    "writes swapped": lambda step, n: step._replace(writes=_swapped(step.writes, n)),
    "read shifted": lambda step, n: step._replace(reads=_shifted(step.reads, n)),
    "write shifted": lambda step, n: step._replace(writes=_shifted(step.writes, n)),
    "a read less": lambda step, n: step._replace(reads=step.reads[1:]),
    "a write less": lambda step, n: step._replace(writes=step.writes[:-1]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_collective_is_rejected_or_right(edit: str) -> None:
    rejected = 0

    @settings(max_examples=MORE * 50)
    @given(st.sampled_from(OPERATORS).flatmap(collective_plans), st.integers(0, 2**20))
    def run(plan: Plan, seed: int) -> None:
        nonlocal rejected
        rank = seed % plan.problem.world
        steps, changed = [], False
        for step in plan.ranks[rank].steps:
            if step.kind == "collective":
                other = EDITS[edit](step, seed)
                changed |= other != step
                steps += [] if other is None else [other]
            else:
                steps.append(step)
        assume(changed)
        entry = plan.ranks[rank]._replace(steps=tuple(steps))
        ranks = (*plan.ranks[:rank], entry, *plan.ranks[rank + 1 :])
        wrong = plan._replace(ranks=ranks)
        if verify(wrong):
            rejected += 1
        else:
            assert goes_wrong(wrong, seed) is None

    run()
    assert rejected > 5


def test_sums_of_a_rank_are_counted_once() -> None:
    plan = lower(Problem.chunked("matmul_all_reduce", 2, 4, 3, 4), SERIAL)
    steps = plan.ranks[0].steps
    entry = plan.ranks[0]._replace(steps=(*steps, steps[-1]._replace(id="again")))
    again = plan.ranks[1].steps[-1]._replace(id="again")
    other = plan.ranks[1]._replace(steps=(*plan.ranks[1].steps, again))
    found = verify(plan._replace(ranks=(entry, other)))
    assert found and "counted twice" in str(found[0])


@pytest.mark.parametrize("target", [HOST, cuda_target()], ids=["host", "cuda"])
def test_engines_run_no_collectives(target: object) -> None:
    plan = lower(Problem.chunked("matmul_all_reduce", 2, 4, 3, 4), SERIAL)
    with pytest.raises(EngineError, match="has no collectives; use target 'library'"):
        compile_plan(plan.ranks[0], target)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_a_library_has_no_copies_and_signals(op: str) -> None:
    plan = plan_of("hetero_unfused_1d", 2, 8, 6, 4, op=op)
    with pytest.raises(EngineError, match=r"target 'library' has no (copy|raise|wait) steps"):
        compile_plan(plan.ranks[0], LIBRARY)


@pytest.mark.parametrize("axis, value", [("compute", "per_chunk"), ("sums", "within")])
def test_a_collective_moves_everything_at_once(axis: str, value: str) -> None:
    schedule = replace(SERIAL, compute="gated") if axis == "sums" else SERIAL
    schedule = replace(schedule, **{axis: value})
    problem = Problem.chunked("matmul_reduce_scatter", 2, 4, 3, 4)
    with pytest.raises(ScheduleError, match="a collective moves everything at once"):
        lower(problem, schedule)
