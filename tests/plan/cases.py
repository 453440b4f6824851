"""Problems, schedules and plans that the plan tests draw from."""

from __future__ import annotations

from hypothesis import strategies as st

from ficco.lowering import lower
from ficco.machine import Link, Machine
from ficco.plan import Plan
from ficco.problem import DTYPES, Output, Problem
from ficco.schedule import Schedule

MESH = Machine("mesh", 1, 64, "host", (Link("node", "pair"),))
SWITCH = Machine("switch", 1, 64, "host", (Link("node", "port"),))
NAMED = Schedule.names()


def describe(plan: Plan) -> str:
    """Return what a failing case needs to be made again."""
    return f"{plan.problem!r} {plan.schedule!r}"


def plan_of(name: str, world: int, m: int, n: int, k: int, dtype: str = "float32") -> Plan:
    problem = Problem.chunked("all_gather_matmul", world, m, n, k, dtype)
    return lower(problem, Schedule.named(name).resolve(world, MESH))


@st.composite
def problems(draw: st.DrawFn, max_world: int = 6) -> Problem:
    world = draw(st.integers(1, max_world))
    k = draw(st.integers(1, 9))
    rows = tuple(draw(st.lists(st.integers(0, 6), min_size=world, max_size=world)))
    if not sum(rows):
        rows = (*rows[:-1], 1)
    outputs = []
    for index in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        columns = draw(st.lists(st.integers(0, 3), min_size=world, max_size=world))
        if not sum(columns):
            columns[0] = 1
        outputs.append(
            Output(
                tuple(columns),
                f"w{index}",
                draw(st.sampled_from(("rows", "rows", "contraction"))),
                draw(st.booleans()),
                draw(st.booleans()),
            )
        )
    dtype = draw(st.sampled_from(tuple(DTYPES)))
    return Problem("all_gather_matmul", world, rows, k, tuple(outputs), dtype)


@st.composite
def schedules(draw: st.DrawFn, problem: Problem) -> Schedule:
    """Any legal point of the design space, named or not."""
    machine = draw(st.sampled_from((MESH, SWITCH)))
    if draw(st.booleans()):
        schedule = Schedule.named(draw(st.sampled_from(NAMED)))
    else:
        schedule = Schedule(
            grain=draw(st.integers(1, 9)),
            cut=draw(st.sampled_from(("rows", "columns"))),
            route=draw(st.sampled_from(("all_peers", "rotation"))),
            order=draw(st.sampled_from(("by_step", "by_peer"))),
            start=draw(st.sampled_from(("together", "local_first"))),
            compute=draw(st.sampled_from(("whole", "per_step", "per_chunk", "gated"))),
            taper=draw(st.sampled_from(("none", "head", "tail", "both"))),
        )
    summing = any(output.axis == "contraction" for output in problem.outputs)
    if schedule.compute == "gated" and (summing or schedule.cut == "columns"):
        schedule = Schedule(grain=schedule.grain, compute="per_chunk", cut=schedule.cut)
    return schedule.resolve(problem.world, machine)


@st.composite
def plans(draw: st.DrawFn, max_world: int = 6) -> Plan:
    problem = draw(problems(max_world))
    return lower(problem, draw(schedules(problem)))
