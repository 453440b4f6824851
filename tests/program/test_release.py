"""What clears the signals of a call and raises `free`: launch, caller's stream, or lane."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ficco.core.errors import EngineError
from ficco.core.machine import Machine
from ficco.lowering import lower_rank
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan import RankPlan, Signal, signal_place
from ficco.plan.schedule import Schedule
from ficco.program import Gated, SignalWrite
from ficco.program.encoding import trace_rows
from ficco.program.passes import compile_plan
from ficco.program.target import MOST_STORED, cuda_target, hip_target

WORLD, RANK = 4, 1
PEERS = [2, 3, 0]
CUDA = Machine.named("cuda")
GATED = Schedule.named("gated_1d")


def plan_of(op: str, schedule: Schedule, grain: int = 2, **fields: object) -> RankPlan:
    problem = Problem.chunked(op, WORLD, 32, 16, 32, "bfloat16")
    found = replace(schedule, grain=grain).resolve(WORLD, CUDA)
    return lower_rank(replace(problem, **fields), found, RANK)


def launches(plan: RankPlan) -> list[Gated]:
    entries = compile_plan(plan, cuda_target()).launches
    return [entry.work for entry in entries if isinstance(entry.work, Gated)]


def writes(plan: RankPlan) -> list[SignalWrite]:
    entries = compile_plan(plan, cuda_target()).entries
    return [entry for entry in entries if isinstance(entry, SignalWrite)]


def released(plan: RankPlan) -> bool:
    """Return whether a launch clears the signals of the call and raises `free`."""
    return any(launch.release is not None for launch in launches(plan))


def ends(plan: RankPlan) -> list[tuple[str, str]]:
    """Return lane and id of what comes last: the steps that clear `data`, and that raise `free`."""
    return [
        (step.lane, step.id)
        for step in plan.steps
        if (step.kind == "clear" and step.signals[0].name == "data")
        or (step.kind == "raise" and step.signals[0].name == "free")
    ]


@pytest.mark.parametrize("route", ["rotation", "all_peers"])
@pytest.mark.parametrize("grain", [1, 3])
def test_a_launch_that_gathers_does_it_all(grain: int, route: str) -> None:
    plan = plan_of("all_gather_matmul", replace(GATED, route=route), grain)
    assert ends(plan) == [("compute", "compute.clear"), ("compute", "compute.leave")]
    (launch,) = launches(plan)
    assert launch.release is not None
    signals = [Signal(RANK, "data", peer, chunk) for peer in PEERS for chunk in range(grain)]
    signals += [Signal(RANK, "entered", peer) for peer in PEERS]
    assert sorted(launch.release.cleared) == sorted(map(signal_place, signals))
    assert launch.release.raised == signal_place(Signal(0, "free", RANK))
    assert sorted(launch.release.peers) == sorted(PEERS)
    assert not {"compute.clear", "compute.leave"} & {entry.id for entry in writes(plan)}


def test_of_several_launches_the_last_does_it() -> None:
    outputs = (Output((8, 8, 8, 8), "w0"), Output((4, 4, 4, 4), "w1"))
    plan = plan_of("all_gather_matmul", GATED, outputs=outputs)
    assert [bool(launch.release) for launch in launches(plan)] == [False, True]


def test_without_columns_there_is_no_launch_to_do_it() -> None:
    some = (Output((8, 8, 8, 8), "w0"), Output((4, 0, 4, 4), "w1"))  # rank 1 has none of w1
    plan = plan_of("all_gather_matmul", GATED, outputs=some)
    assert [bool(launch.release) for launch in launches(plan)] == [True]
    plan = plan_of("all_gather_matmul", GATED, outputs=(Output((8, 0, 8, 8)),))
    assert ends(plan) == [("compute", "compute.clear"), ("compute", "compute.leave")]
    assert not released(plan)


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_of_sums_one_kernel_does_it(op: str) -> None:
    plan = plan_of(op, GATED)
    assert ends(plan) == [("compute", "compute.clear"), ("compute", "compute.leave")]
    assert not released(plan)
    (last,) = [entry for entry in writes(plan) if entry.id == "compute.clear"]
    assert last.how == "kernel" and {signal.name for signal in last.raises} == {"free"}


@pytest.mark.parametrize("order", ["by_peer", "by_step"])
@pytest.mark.parametrize("sums", ["apart", "within"])
@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_what_a_launch_tells_is_cleared_at_the_end(op: str, sums: str, order: str) -> None:
    """Not between a wait and its copy, nor behind the copies, which the end does not wait for."""
    plan = plan_of(op, replace(GATED, sums=sums, order=order))
    told = [signal for step in plan.steps for part in step.parts for signal in part.raises]
    (clear,) = [step for step in plan.steps if step.id == "compute.clear"]
    assert told
    assert set(told) <= set(clear.signals)
    steps = {step.id: step for step in plan.steps}
    waited = [steps[name].signals for name in clear.after if name.startswith(("made", "summed"))]
    # Behind the parts that are pushed, or from a lane of their own.
    apart = order == "by_step" and sums == "within" and op == "matmul_all_reduce"
    assert len(waited) == (2 if apart else 1)
    assert not [
        step
        for step in plan.steps
        if step.kind == "clear" and set(step.signals) & set(told) and step is not clear
    ]


def test_streams_write_few_signals_and_a_kernel_many() -> None:
    problem = Problem.chunked("matmul_reduce_scatter", 2, 8, 16, 8, "bfloat16")
    plan = lower_rank(problem, Schedule.named("shard_p2p").resolve(2, CUDA), 0)
    stored = [entry for entry in writes(plan) if entry.how == "kernel"]
    (last,) = stored  # two that are cleared, one that is raised
    assert (len(last.clears), len(last.raises)) == (2, 1)
    (*others, leave) = plan.steps
    assert leave.id == "compute.leave"
    fewer = plan._replace(steps=tuple(others))
    assert all(entry.how == "stream" for entry in writes(fewer))
    without = compile_plan(plan, cuda_target(stores=False)).entries
    assert all(e.how == "stream" for e in without if isinstance(e, SignalWrite))


def test_a_kernel_stores_so_many_signals_and_zeros_first() -> None:
    names = [Signal(RANK, "data", peer, chunk) for peer in PEERS for chunk in range(60)]
    leave = tuple([Signal(peer, "free", RANK) for peer in PEERS])
    plan = plan_of("matmul_reduce_scatter", GATED)
    steps = [step._replace(signals=tuple(names)) if step.id == "compute.clear" else step
             for step in plan.steps]  # fmt: skip
    found = [e for e in writes(plan._replace(steps=tuple(steps))) if "clear" in e.id][-2:]
    assert [(len(e.clears), len(e.raises)) for e in found] == [(MOST_STORED, 0), (53, 3)]
    assert found[1].raises == leave and not found[1].after


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_other_schedules_leave_it_to_the_stream_that_works(op: str) -> None:
    """Though there is work behind the last wait: another lane would have to be joined to it."""
    plan = plan_of(op, Schedule.named("hetero_fused_1d"))
    assert ends(plan) == [("compute", "compute.clear"), ("compute", "compute.leave")]
    assert not released(plan)


def test_what_another_lane_reads_is_kept_until_it_has() -> None:
    outputs = (Output((4, 4, 4, 4)), Output((32,) * WORLD, "", "gathered"))
    plan = plan_of("all_gather_matmul", GATED, outputs=outputs)
    clear, leave = [step for step in plan.steps if step.id in ("compute.clear", "compute.leave")]
    assert clear.after and not leave.after, "the copies that keep what came"
    assert not released(plan)


@pytest.mark.parametrize("name", ["one_shot_pull", "two_shot_pull", "gated_sums_1d"])
def test_a_place_that_a_kernel_reports_belongs_to_one_wait(name: str) -> None:
    """Ranks whose windows peers read wait for `free` twice; a message names the first wait."""
    plan = plan_of("matmul_all_reduce", Schedule.named(name))
    rows = [row.name for row in trace_rows(compile_plan(plan, cuda_target())) if row.kind == "wait"]
    assert len(rows) == len(set(rows))
    if name != "gated_sums_1d":
        waits = [step.id for step in plan.steps if step.kind == "wait"]
        assert "compute.wait_read" in waits and "compute.wait_read" not in rows
        assert rows == [wait for wait in waits if wait != "compute.wait_read"]


def test_kernels_that_wait_do_not_overtake_the_clear_of_free() -> None:
    """Such a wait is on the caller's stream, and would see the signal of the previous call."""
    plan = plan_of("all_gather_matmul", Schedule.named("hetero_fused_1d"))
    clear = next(s for s in plan.steps if s.kind == "clear" and s.signals[0].name == "free")
    again = clear._replace(id="again", kind="wait", after=(plan.steps[-1].id,))
    longer = plan._replace(steps=(*plan.steps, again))
    assert compile_plan(longer, cuda_target()).entries[-1].id == "again"
    for target in (hip_target(), cuda_target(wait="kernel")):
        with pytest.raises(EngineError, match="behind its clear"):
            compile_plan(longer, target)
