"""Problems, schedules and plans that the plan tests draw from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

from hypothesis import given, reject, settings
from hypothesis import strategies as st

from ficco.core.dtypes import DTYPES, INDEX_DTYPES
from ficco.core.errors import ScheduleError
from ficco.core.machine import Link, Machine
from ficco.lowering import finishing, lower
from ficco.lowering.cutting import is_edged
from ficco.lowering.one_kernel_gather import is_one_kernel
from ficco.lowering.sending import sends_all
from ficco.operators import OPERATORS, registry
from ficco.operators.problem import MODES, Problem
from ficco.operators.problem_checks import Output
from ficco.plan import Plan
from ficco.plan.schedule import Schedule

MESH = Machine("mesh", 1, 64, "host", (Link("node", "pair"),))
SWITCH = Machine("switch", 1, 64, "host", (Link("node", "port"),))
NAMED = Schedule.names()
DENSE = tuple(op for op in OPERATORS if not registry.get(op).flow.routes)  # without experts
ROUTED = tuple(op for op in OPERATORS if op not in DENSE)
ONE_KERNEL = {  # calls of one launch
    op: tuple(name for name in Schedule.names(op) if Schedule.named(name).transport == "sm")
    for op in DENSE
    if not registry.get(op).flow.pools
}


def describe(plan: Plan) -> str:
    """Return what a failing case needs to be made again."""
    return f"{plan.problem!r} {plan.schedule!r}"


def plan_of(
    name: str, world: int, m: int, n: int, k: int, dtype: str = "float32",
    op: str = "all_gather_matmul",
) -> Plan:  # fmt: skip
    problem = Problem.chunked(op, world, m, n, k, dtype)
    return lower(problem, Schedule.named(name).resolve(world, MESH))


def sizes(draw: st.DrawFn, count: int, most: int) -> tuple[int, ...]:
    """Draw sizes of 0 or more, not all 0."""
    found = draw(st.lists(st.integers(0, most), min_size=count, max_size=count))
    return tuple(found) if sum(found) else (*found[:-1], 1)


def split(draw: st.DrawFn, depth: int) -> tuple[int, ...]:
    """Depths of one to three pairs that add up to this one, some of them 0."""
    first, second = (draw(st.integers(0, depth)) for _ in range(2))
    low, high = min(first, second), max(first, second)
    return draw(st.sampled_from([(depth,), (low, depth - low), (low, high - low, depth - high)]))


@st.composite
def problems(draw: st.DrawFn, max_world: int = 6, op: str | None = None) -> Problem:
    op = draw(st.sampled_from(OPERATORS)) if op is None else op
    world = draw(st.integers(1, max_world))
    if op == "all_gather_matmul":
        return draw(gathering_problems(world))
    k, n = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    dtype = draw(st.sampled_from(tuple(DTYPES)))
    turned = draw(st.booleans())
    if registry.get(op).flow.routes:
        return draw(expert_problems(op, world, k, n, dtype))
    if op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        if op == "matmul_all_reduce":  # where slices of columns are 16 wide or wider
            n = draw(st.sampled_from((n, n, n, 35)))
        depths, rows = sizes(draw, world, 4), sizes(draw, world, 6)
        output = Output((n,) * world, operand_transposed=turned, bias=draw(st.booleans()))
        pairs = tuple(split(draw, depth) for depth in depths) if draw(st.booleans()) else ()
        return Problem(op, world, rows, sum(depths), (output,), dtype, depths=depths, pairs=pairs)
    if op == "embedding_all_to_all":
        tables = tuple(tuple(draw(st.lists(st.integers(1, 4), max_size=3))) for _ in range(world))
        tables = tables if any(tables) else ((2,), *tables[1:])
        lookups = tuple(tuple(draw(st.integers(1, 9)) for _ in mine) for mine in tables)
        rows = sizes(draw, world, 5)
        modes = tuple(tuple(draw(st.sampled_from(MODES)) for _ in mine) for mine in tables)
        return Problem(
            op, world, rows, 1, (Output((n,) * world),), dtype, tables=tables, lookups=lookups,
            modes=draw(st.sampled_from(((), modes))),
            index_dtype=draw(st.sampled_from(INDEX_DTYPES)),
        )  # fmt: skip
    splits = [list(sizes(draw, world, 4)) for _ in range(world)]
    if draw(st.booleans()):
        splits[draw(st.integers(0, world - 1))] = [0] * world
    if not sum(map(sum, splits)):
        splits[0][0] = 1
    rows = tuple(sum(row) for row in splits)
    bias = op == "all_to_all_matmul" and draw(st.booleans())
    output = Output((n,) * world, operand_transposed=turned, bias=bias)
    table = tuple(tuple(row) for row in splits)
    return Problem(op, world, rows, k, (output,), dtype, splits=table)


@st.composite
def expert_problems(draw: st.DrawFn, op: str, world: int, k: int, n: int, dtype: str) -> Problem:
    outputs = [Output((n,) * world, operand_transposed=draw(st.booleans()))]
    if registry.get(op).flow.gathers and draw(st.booleans()):
        outputs.append(Output((k,) * world, "", "gathered"))
    numbers = st.integers(1, 3)
    capacities = tuple(draw(st.integers(1, 9)) for _ in range(world))
    return Problem(
        op, world, sizes(draw, world, 5), k, tuple(outputs), dtype, experts=draw(numbers),
        topk=draw(numbers), capacities=capacities,
    )  # fmt: skip


@st.composite
def gathering_problems(draw: st.DrawFn, world: int) -> Problem:
    k = draw(st.sampled_from((*range(1, 10), 35)))  # slices of columns are 16 wide or wider
    rows = sizes(draw, world, 6)
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
    if draw(st.integers(0, 2)) == 0:
        at = draw(st.integers(0, len(outputs)))
        outputs.insert(at, Output((k,) * world, "", "gathered"))
    dtype = draw(st.sampled_from(tuple(DTYPES)))
    return Problem("all_gather_matmul", world, rows, k, tuple(outputs), dtype)


@st.composite
def schedules(draw: st.DrawFn, problem: Problem, gated: bool = False) -> Schedule:
    """Any legal point of the design space, named or not; gated ones alone, where there are any."""
    machine = draw(st.sampled_from((MESH, SWITCH)))
    if problem.flow.routes:
        return draw(expert_schedules(problem)).resolve(problem.world, machine)
    direct = ONE_KERNEL.get(problem.op, ())
    if max(map(len, problem.pairs), default=1) > 1:
        direct = ()  # it multiplies one pair
    if problem.op == "all_gather_matmul":
        every = sends_all(problem)
        fits = {"gather_sm": is_one_kernel(problem), "push_sm": every, "whole_sm": every}
        direct = tuple(name for name in direct if fits[name])
    if any(output.bias for output in problem.outputs):  # of the rank that owns a row
        direct = tuple(name for name in direct if name != "one_shot_pull")
    if not gated and direct and draw(st.integers(0, 2)) == 0:
        return replace(Schedule.named(draw(st.sampled_from(direct))), grain=draw(st.integers(1, 9)))
    if not gated and draw(st.booleans()):
        schedule = Schedule.named(draw(st.sampled_from(NAMED)))
    else:
        schedule = Schedule(
            grain=draw(st.integers(1, 9)),
            cut=draw(st.sampled_from(("rows", "columns"))),
            route=draw(st.sampled_from(("all_peers", "rotation"))),
            order=draw(st.sampled_from(("by_step", "by_peer"))),
            start=draw(st.sampled_from(("together", "local_first"))),
            compute="gated"
            if gated
            else draw(st.sampled_from(("whole", "per_step", "per_chunk", "gated"))),
            taper=draw(st.sampled_from(("none", "head", "tail", "both", "edge"))),
            pace=draw(st.sampled_from(("free", "in_step"))),
        )
    summing = all(output.axis == "contraction" for output in problem.products)
    gathers = problem.op in ("all_gather_matmul", "all_to_all_matmul")
    if schedule.compute == "gated" and (summing or (gathers and schedule.cut == "columns")):
        schedule = Schedule(grain=schedule.grain, compute="per_chunk", cut=schedule.cut)
    if problem.op == "embedding_all_to_all":
        schedule = replace(schedule, cut="rows")
    schedule = schedule.resolve(problem.world, machine)
    if registry.get(problem.op).flow.sums and schedule.compute == "gated":
        schedule = replace(schedule, sums=draw(st.sampled_from(("apart", "within"))))
    if schedule.taper == "edge":
        legal = is_edged(problem.flow) and schedule.cut == "rows" and schedule.sums == "apart"
        legal_axes = {"route": "rotation", "order": "by_peer"}
        schedule = replace(schedule, **(legal_axes if legal else {"taper": "none"}))
    turns = gathers or problem.op == "matmul_all_reduce"
    if not turns or schedule.route != "rotation":
        schedule = replace(schedule, pace="free")
    sums_go_round = registry.get(problem.op).flow.sums and schedule.compute == "per_chunk"
    sums_go_round = sums_go_round and schedule.taper != "edge"
    if sums_go_round and schedule.start == "local_first" and draw(st.booleans()):
        schedule = replace(schedule, sums="along")
    return schedule


@st.composite
def expert_schedules(draw: st.DrawFn, problem: Problem) -> Schedule:
    """Schedules of operators with experts; those that return rows have no axes to vary."""
    named = Schedule.named(draw(st.sampled_from(Schedule.names(problem.op))))
    if not problem.flow.gathers:
        return named
    return replace(
        named, grain=draw(st.integers(1, 5)),
        route=draw(st.sampled_from(("all_peers", "rotation"))),
        order=draw(st.sampled_from(("by_step", "by_peer"))),
        start=draw(st.sampled_from(("together", "local_first"))),
        taper=draw(st.sampled_from(("none", "head", "tail", "both"))),
    )  # fmt: skip


@st.composite
def plans(draw: st.DrawFn, max_world: int = 6, op: str | None = None, gated: bool = False) -> Plan:
    problem = draw(problems(max_world, op))
    schedule = draw(schedules(problem, gated))
    small = draw(st.sampled_from((0, finishing.SMALL_BYTES)))  # 0: as of large problems
    with mock.patch.object(finishing, "SMALL_BYTES", small):
        return lower(problem, schedule)


@cache
def drawn(
    count: int, strategy: Callable[..., st.SearchStrategy[Plan]], **kinds: Any
) -> list[tuple[Plan, int]]:
    """Return `count` plans of a strategy, each with a random number, drawn once in a process.

    Tests that edit plans share them, as drawing a plan takes about as long as verifying it.
    """
    found = []

    @settings(max_examples=count)
    @given(strategy(**kinds), st.integers(0, 2**20))
    def keep(plan: Plan, number: int) -> None:
        found.append((plan, number))

    keep()
    return found


@st.composite
def collective_plans(draw: st.DrawFn, op: str, max_world: int = 5) -> Plan:
    """Plans of a library's collective and whole GEMMs."""
    problem = draw(problems(max_world, op))
    try:
        return lower(problem, Schedule(name="serial", compute="whole", transport="collective"))
    except ScheduleError as refusal:
        assert "bias" in str(refusal)
        reject()
