"""An operand that follows x is one entry of a record: nothing else knows it, and it travels.

A term has a row for each row of x and is added to the products of that row. It stands in for the
scales of a dtype: it has a dtype of its own, is cut and sent with the rows of x, and is bound with
them where they are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ficco
from ficco.core.errors import EngineError, InputError, ScheduleError
from ficco.core.machine import Machine
from ficco.lowering import lower
from ficco.measure import simulator
from ficco.operators import oracle, registry
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.operators.registry import Attachment
from ficco.plan import Plan
from ficco.plan.plan_json import dumps, loads
from ficco.plan.schedule import Schedule
from ficco.program.passes import compile_plan
from ficco.program.passes.readback import read_back_plan
from ficco.program.target import HOST, LIBRARY
from ficco.verifier import verify

GATHERS = ("all_gather_matmul", "all_to_all_matmul")
SCATTERS = ("matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all")
TERM = Attachment("e", "term", "x", "float32")


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    for op in (*GATHERS, *SCATTERS):
        known = registry.get(op)
        registry.register(
            replace(known, name=f"{op}_plus", function=None, schedules=(), attachments=(TERM,))
        )
    yield
    for op in (*GATHERS, *SCATTERS):
        del registry._operators[f"{op}_plus"]


def problem_of(op: str, world: int, dtype: str = "float32", bias: bool = False) -> Problem:
    rows = tuple((7 * rank + 5) % 11 for rank in range(world))
    problem = Problem.chunked(f"{op}_plus", world, sum(rows), 6 * world, 9, dtype, bias, rows)
    columns = (6,) * world
    return replace(problem, outputs=(replace(problem.outputs[0], columns=columns),))


def schedules(problem: Problem) -> Iterator[Schedule]:
    machine = Machine.named("host")
    for name in Schedule.names(problem.op):
        for grain in (1, 3):
            yield replace(Schedule.named(name), grain=grain).resolve(problem.world, machine)
    for axes in (
        {"cut": "columns", "compute": "per_chunk"},
        {"compute": "gated", "order": "by_peer"},
        *({"compute": "gated", "sums": "within"} for _ in range(problem.flow.sums)),
    ):
        yield replace(Schedule(name="own", grain=2), **axes).resolve(problem.world, machine)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("op", [*GATHERS, *SCATTERS])
def test_a_term_of_x_is_proved_and_gives_what_the_oracle_says(
    op: str, world: int, dtype: str
) -> None:
    problem = problem_of(op, world, dtype, bias=op != "matmul_all_to_all")
    given = oracle.inputs(problem, 1)
    assert given[0]["e"].dtype == np.float32
    exact = oracle.results(problem, given)
    done = 0
    with ficco.Node(world) as node:
        for schedule in schedules(problem):
            plan = lower(problem, schedule)
            assert not verify(plan), schedule
            if schedule.transport == "collective":
                continue
            if dtype == "float16" and schedule.compute != "gated":
                with pytest.raises(
                    EngineError, match="float16 and float32; target 'library' needs"
                ):
                    compile_plan(plan.ranks[0], LIBRARY)
            programs = [compile_plan(rank, HOST) for rank in plan.ranks]
            assert not verify(read_back_plan(plan, programs)), schedule
            ys = node.run(problem, given, schedule=schedule)
            times = oracle.roundings(problem, schedule.sums == "along")
            for rank in range(world):
                y = ys[rank][0]
                assert oracle.judge(y, exact[rank][0], dtype, times).ok, (schedule, rank)
            done += 1
    assert done > 6


@pytest.mark.parametrize("op", GATHERS)
def test_it_travels_with_its_rows_and_once(op: str) -> None:
    problem = problem_of(op, 3)
    plan = lower(problem, Schedule(grain=2, cut="columns").resolve(3, Machine.named("host")))
    window = plan.ranks[0].buffer("gathered_e")
    assert (window.role, window.cols, window.copies) == ("window", 6, 2)
    for rank in plan.ranks:
        pushes = [step for step in rank.steps if step.kind == "copy"]
        sent = [box for step in pushes for box in step.reads if box.buffer == "e"]
        assert sum(box.rows for box in sent) == sum(
            block.rows
            for peer, block in enumerate(problem.operator.blocks(problem, rank.rank).outgoing)
            if peer != rank.rank
        )
        for step in pushes:  # under the signal of their rows
            x, *beside = step.reads
            assert [box[2:4] for box in beside] == [x[2:4]] * (x.col0 == 0)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_all_to_all"])
def test_a_plan_without_it_is_refused(op: str) -> None:
    problem = problem_of(op, 2)
    plan = lower(problem, Schedule(grain=2).resolve(2, Machine.named("host")))
    assert loads(dumps(plan)) == plan
    ranks = []
    for rank in plan.ranks:
        steps = [
            step._replace(products=tuple(p._replace(add=()) for p in step.products))
            for step in rank.steps
        ]
        ranks.append(rank._replace(steps=tuple(steps)))
    assert "e of rank 0 is missing" in str(verify(Plan(*plan[:3], tuple(ranks)))[0])


def test_the_simulator_counts_it() -> None:
    machine = Machine.named("h200x4")
    sizes: Any = ("all_gather_matmul", 4, 8192, 4096, 1024, "float32")
    plain = Problem.chunked(*sizes)
    problem = replace(plain, op="all_gather_matmul_plus")
    schedule = Schedule.named("hetero_unfused_1d").resolve(4, machine)
    times = [simulator.predict(each, schedule, machine).duration_us for each in (plain, problem)]
    assert times[1] > times[0]


def test_what_does_not_work_is_refused() -> None:
    problem = problem_of("all_gather_matmul", 2)
    with pytest.raises(ScheduleError, match=r"take no operands that follow x \(e\)"):
        lower(problem, Schedule.named("gather_sm").resolve(2, Machine.named("host")))
    with pytest.raises(InputError, match="e is added to the products of its rows"):
        replace(problem, outputs=(Output((6, 5)),))
    known = registry.get("all_gather_matmul_plus")
    wrong = replace(known, name="wrong", attachments=(TERM._replace(role="scale"),))
    registry.register(wrong)
    try:
        with pytest.raises(InputError, match="is a 'scale' of 'float32' that follows 'x'"):
            replace(problem, op="wrong")
    finally:
        del registry._operators["wrong"]
