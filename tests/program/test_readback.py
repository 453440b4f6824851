"""Programs of every operator, schedule and target are proved, and edited programs are not."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from typing import Any

import pytest
from cases import MESH, SWITCH, describe, drawn, plans
from hypothesis import strategies as st
from interpreter import Wrong, interpret
from program_edits import EDITS, edited, exchanged, without_entry

from ficco.core.errors import EngineError, PlanError, ScheduleError
from ficco.lowering import lower
from ficco.operators import OPERATORS
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan import Plan
from ficco.plan.plan_json import dumps
from ficco.plan.schedule import Schedule
from ficco.program import Copy, Gemm, Launch, Program, SignalWrite, Wait
from ficco.program.passes import compile_plan
from ficco.program.passes.readback import read_back_plan
from ficco.program.target import HOST, Target, cuda_target, hip_target, own_signals
from ficco.verifier import verify

MORE = int(os.environ.get("FICCO_EXAMPLES", "1"))  # times as many random programs

TARGETS = {
    "host": lambda rank: HOST,
    "cuda": lambda rank: cuda_target(),
    "signals by copies": lambda rank: cuda_target(own_signals(rank)),
    "no kernel that stores": lambda rank: cuda_target(own_signals(rank), stores=False),
    "rows by single copies": lambda rank: cuda_target()._replace(copies_2d=False),
    "waits by kernels": lambda rank: cuda_target()._replace(wait="kernel"),
    "AMD devices": lambda _: hip_target(),
    "AMD devices, without own kernels": lambda _: hip_target(gathers=False),
    "a library without own kernels": lambda rank: cuda_target(kernels=False),
    "a different target for each rank": lambda rank: (
        cuda_target(),
        cuda_target(own_signals(rank), stores=False),
        cuda_target()._replace(copies_2d=False, wait="kernel"),
    )[rank % 3],
}

FEW_KERNELS = (
    "AMD devices", "AMD devices, without own kernels", "a library without own kernels"
)  # fmt: skip


def programs_of(plan: Plan, name: str) -> list[Program]:
    """Compile all ranks' plans for a target by name."""
    targets: list[Target] = [TARGETS[name](rank) for rank in range(plan.problem.world)]
    return [compile_plan(entry, t) for entry, t in zip(plan.ranks, targets, strict=True)]


def wrong(plan: Plan, seed: int) -> str | None:
    """Return how a plan goes wrong, by the interpreter, or None."""
    data = json.loads(dumps(plan))
    concurrent = any(step.concurrent for entry in plan.ranks for step in entry.steps)
    for each in (seed, seed + 1):
        for in_order in (False,) if concurrent else (False, True):
            try:
                interpret(data, each, calls=3, in_order=in_order)
            except Wrong as error:
                return str(error)
    return None


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", OPERATORS)
def test_programs_are_proved_and_interpreted_right(op: str, target: str) -> None:
    ran = 0
    for plan, seed in drawn(MORE * 15, plans, op=op):
        try:
            programs = programs_of(plan, target)
        except ScheduleError:
            assert op == "embedding_all_to_all" and plan.schedule.compute == "gated"
            continue
        except EngineError:  # mailboxes need ficco's kernels
            assert plan.schedule.transport == "sm" and target in FEW_KERNELS
            continue
        back = read_back_plan(plan, programs)
        found = verify(back)
        assert not found, f"{found[0]}; {describe(plan)}"
        assert wrong(back, seed) is None, describe(plan)
        ran += 1
    assert ran > 4


def test_host_programs_have_an_entry_for_each_copy_and_product() -> None:
    plan = lower(
        Problem.chunked("all_gather_matmul", 3, 12, 6, 8, "float32"),
        Schedule.named("hetero_fused_1d").resolve(3, MESH),
    )
    for entry, program in zip(plan.ranks, programs_of(plan, "host"), strict=True):
        copies = sum(len(step.reads) for step in entry.steps if step.kind == "copy")
        products = sum(len(step.products) for step in entry.steps)
        kinds = [type(e) for e in program.entries]
        assert kinds.count(Copy) == copies
        assert kinds.count(Launch) == products
        waits = [step for step in entry.steps if step.kind == "wait"]
        assert kinds.count(Wait) == len(waits)
        assert kinds.count(SignalWrite) == len(entry.steps) - len(waits) - sum(
            step.kind in ("copy", "gemm") for step in entry.steps
        )


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("grain", [1, 3])
def test_products_before_a_kernel_are_a_part_of_the_proof(
    world: int, bias: bool, grain: int
) -> None:
    """Two shots of many rows: a library multiplies first. One shot may not: it has rounded sums."""
    problem = Problem.chunked("matmul_all_reduce", world, 100, 40, 9 * world, "bfloat16", bias=bias)
    schedule = replace(Schedule.named("two_shot_sm"), grain=grain).resolve(world, MESH)
    plan = lower(problem, schedule)
    programs = programs_of(plan, "cuda")
    assert all(isinstance(program.launches[0].work, Gemm) for program in programs)
    assert not verify(read_back_plan(plan, programs))
    late = [program._replace(entries=program.entries[::-1]) for program in programs]
    assert verify(read_back_plan(plan, late))


def test_one_kernel_of_a_rank_without_depth_is_proved() -> None:
    """Its parts for several peers are zeros, and begin at the same row of their mailboxes."""
    rows, output = (0, 6, 1, 4), Output((4,) * 4)
    problem = Problem("matmul_all_reduce", 4, rows, 5, (output,), "bfloat16", depths=(0, 0, 1, 4))
    plan = lower(problem, replace(Schedule.named("two_shot_sm"), grain=6).resolve(4, MESH))
    assert not verify(read_back_plan(plan, programs_of(plan, "cuda")))


@st.composite
def even_plans(draw: st.DrawFn) -> Plan:
    """Plans of equal shards, whose products and sums are batches."""
    op, name = draw(st.sampled_from([
        ("all_gather_matmul", "uniform_fused_1d"), ("all_gather_matmul", "gated_1d"),
        ("matmul_reduce_scatter", "hetero_fused_1d"),
        ("matmul_reduce_scatter", "gated_sums_1d"), ("matmul_all_reduce", "gated_sums_1d"),
        ("matmul_all_reduce", "gated_1d"),
    ]))  # fmt: skip
    world = draw(st.integers(2, 4))
    output_bias = op != "all_gather_matmul" and draw(st.booleans())
    problem = Problem.chunked(op, world, 4 * world, 5, 3 * world, "float32", bias=output_bias)
    return lower(problem, Schedule.named(name).resolve(world, SWITCH))


def judge(plan: Plan, programs: list[Program], seed: int) -> bool:
    """Return whether the verifier refuses edited programs; what it accepts must run right."""
    try:
        back = read_back_plan(plan, programs)
    except PlanError:  # a table that fits no kernel, or a way to store that the target lacks
        return True
    if verify(back):
        return True
    assert wrong(back, seed) is None, describe(plan)
    return False


@pytest.mark.parametrize("name", [*EDITS, "exchanged", "Copy", "SignalWrite", "Wait", "Launch"])
def test_edited_programs_are_refused_or_right(name: str) -> None:
    kinds: dict[str, Any] = {
        "Copy": Copy, "SignalWrite": SignalWrite, "Wait": Wait, "Launch": Launch,
    }  # fmt: skip
    applied = refused = 0

    gated = name.startswith(("part", "release", "without_release", "without_bias"))
    even = name in (
        "fewer_products", "fewer_slots", "other_distance", "part_without_terms",
        "part_without_wait", "release_of_fewer_peers", "release_that_clears_less",
        "without_release", "fewer_waits", "Wait", "without_after", "exchanged",
    )  # fmt: skip
    one_kernel = name == "other_table"
    one_target = gated or even or one_kernel
    targets = ["cuda"] if one_target else ["cuda", "host", "signals by copies"]
    op = "embedding_all_to_all" if name in ("other_mode", "other_tables") else None
    op = "matmul_all_reduce" if one_kernel else op
    count = MORE * (120 if gated else 30)
    found = drawn(count, even_plans) if even else drawn(
        count, plans, max_world=4, op=op, gated=gated
    )  # fmt: skip
    for plan, seed in found:
        rng = random.Random(seed)
        try:
            programs = programs_of(plan, rng.choice(targets))
        except ScheduleError:
            continue
        rank = rng.randrange(len(programs))
        program = programs[rank]
        if name in kinds:
            changed = without_entry(program, kinds[name], rng)
        elif name == "exchanged":
            changed = exchanged(program, rng)
        else:
            changed = edited(program, EDITS[name], rng)
        if changed is None:
            continue
        programs[rank] = changed
        applied += 1
        refused += judge(plan, programs, seed)
    assert applied > 1, f"{name} hardly ever applies"
    assert refused, f"{name}: nothing was refused"
