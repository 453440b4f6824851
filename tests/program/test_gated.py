"""Gated steps as launches: what kernels do, and what they are not asked to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handmade import signalling_reduce_scatter

from ficco.cli.report.plan_text import program_text
from ficco.core.errors import ScheduleError
from ficco.core.machine import Machine
from ficco.lowering import lower, lower_rank
from ficco.operators.problem import Problem
from ficco.plan import Signal
from ficco.plan.schedule import Schedule
from ficco.program import Gated, Gemm
from ficco.program.passes import compile_plan
from ficco.program.passes.gated import launches_of, only_waits
from ficco.program.target import LEFT_TO_COPIES, cuda_target, hip_target


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("cut", ["rows", "columns"])
@pytest.mark.parametrize("pairs", [(), ((2, 3), (1, 4), (5,))])
def test_sums_within_are_a_launch_behind_that_of_peers_parts(
    op: str, cut: str, pairs: tuple[tuple[int, ...], ...]
) -> None:
    problem = Problem.chunked(op, 3, 12, 8, 15, "bfloat16", bias=True)
    schedule = replace(Schedule.named("gated_sums_1d"), grain=2, route="rotation", cut=cut)
    plan = lower_rank(replace(problem, pairs=pairs), replace(schedule, transport="dma"), 1)
    pushing, summing = [launches_of(plan, step) for step in plan.steps if step.parts]
    (pushed,), (summed,) = pushing, summing
    assert len(pushed.parts) == 4 and all(part.signal >= 0 for part in pushed.parts)
    assert pushed.bias is None and pushed.recv is None and pushed.c.buffer == "partial"
    assert len(summed.parts) == 2 and summed.bias is not None and summed.recv is not None
    assert all(len(part.terms) == 3 for part in summed.parts)
    sent_on = op == "matmul_all_reduce"
    assert all((part.signal >= 0) == sent_on for part in summed.parts)
    assert summed.c.buffer == "y0" and summed.begun == pushed.begun == bool(pairs)
    assert {part.col for part in summed.parts} == ({0} if cut == "rows" else {0, 4})


def test_parts_of_several_kinds_are_no_launch() -> None:
    plan = signalling_reduce_scatter().ranks[0]
    step = next(step for step in plan.steps if step.parts)
    with pytest.raises(ScheduleError, match="a separate launch"):
        launches_of(plan, step)


def test_no_part_waits_for_a_digest() -> None:
    plan = signalling_reduce_scatter().ranks[0]
    step = next(step for step in plan.steps if step.parts)
    parts = [part._replace(waits=(Signal(0, "entered", 1),)) for part in step.parts]
    with pytest.raises(ScheduleError, match="`entered`, which needs a wait step"):
        launches_of(plan, step._replace(parts=tuple(parts)))


@pytest.mark.parametrize(
    ("op", "waits"),
    [
        ("all_gather_matmul", True), ("all_to_all_matmul", True), ("matmul_reduce_scatter", False),
        ("matmul_all_reduce", False), ("matmul_all_to_all", False),
    ],
)  # fmt: skip
def test_amd_devices_have_a_launch_for_parts_that_only_wait(op: str, waits: bool) -> None:
    """It releases no window. With it, or without, the program has the same products."""
    problem = Problem.chunked(op, 3, 12, 9, 15, "bfloat16")
    schedule = replace(Schedule.named("gated_1d"), grain=2).resolve(3, Machine.named("mi300x8"))
    plan = lower_rank(problem, schedule, 1)
    (step,) = [step for step in plan.steps if step.parts]
    assert only_waits(plan, step) == waits
    works = [launch.work for launch in compile_plan(plan, hip_target()).launches]
    gated = [work for work in works if isinstance(work, Gated)]
    apart = compile_plan(plan, hip_target(gathers=False)).launches
    products = [launch.work for launch in apart if isinstance(launch.work, Gemm)]
    if not waits:
        assert not gated and works == [launch.work for launch in apart]
        return
    (work,) = gated
    assert work.release is None and len(work.parts) == len(step.parts) == len(products)
    assert [part.rows for part in work.parts] == [product.a.rows for product in products]


@pytest.mark.parametrize(
    ("op", "name", "waits"),
    [
        ("all_gather_matmul", "gated_1d", True), ("matmul_reduce_scatter", "gated_1d", False),
        ("matmul_reduce_scatter", "gated_sums_1d", True), ("matmul_all_reduce", "gated_1d", False),
        ("matmul_all_reduce", "gated_sums_1d", True),
    ],
)  # fmt: skip
def test_waiting_launches_leave_multiprocessors_to_copies_within_a_device(
    op: str, name: str, waits: bool
) -> None:
    """Copies between ranks that share a device are kernels; other launches wait for none."""
    problem = Problem.chunked(op, 3, 12, 9, 15, "bfloat16")
    schedule = replace(Schedule.named(name), grain=2).resolve(3, Machine.named("cuda"))
    plan = lower(problem, schedule)
    for shared in (False, True):
        program = compile_plan(plan.ranks[1], cuda_target(shared=shared))
        works = [launch.work for launch in program.launches if isinstance(launch.work, Gated)]
        waiting = [any(part.word >= 0 or part.terms for part in work.parts) for work in works]
        assert any(waiting) == waits
        assert [work.leaves for work in works] == [LEFT_TO_COPIES * shared * w for w in waiting]
        said = program_text(plan, [program]).count(f"leaves {LEFT_TO_COPIES} multiprocessors free")
        assert said == shared * sum(waiting)
