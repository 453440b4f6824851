"""Every lowered plan comes to its end, in an order that its steps allow; closed forms of some."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from cases import DENSE, MESH, ROUTED, plans
from hypothesis import given, settings

from ficco.core.curves import Curve
from ficco.core.dtypes import ELEMENT_BYTES
from ficco.core.errors import EngineError, ScheduleError
from ficco.core.machine import Costs, Link, Machine
from ficco.lowering import lower
from ficco.measure.simulator import REGIMES, simulate, simulate_ms
from ficco.measure.simulator.encoding import is_whole_call, simulated_target
from ficco.operators import OPERATORS
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan import Plan, Region, Signal, Step, copy_unit
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import Span, Timeline
from ficco.program import Copy, Entry, Gated, Program, SignalWrite, Wait, kind_of
from ficco.program.passes import compile_plan
from ficco.program.passes.readback import read_back
from ficco.program.target import cuda_target

COSTS = Costs(
    launch_us=2, call_us=3, signal_us=1, raise_us=1.5, wait_us=0.25, clear_us=0.5, host_call_us=10,
    host_launch_us=3, host_copy_us=2, host_words_us=1, skew_us=4, gemm_beside_copies=1.1,
    copies_beside_gemm=1.2, pull_us=4,
)  # fmt: skip
GPUS = Machine(
    "gpus", 1, 64, "cuda",
    (
        Link(
            "node", "port", ((64, 0.001), (1024, 0.01)), 3.0,
            out_gbps=Curve(((1.0, 0.01), (3.0, 0.006))), row_gbps=Curve(((8.0, 0.002),)),
            turn_us=Curve(((64.0, 1.0),)),
        ),
    ),
    copy_engines=2, gemm_gflops=(("any", 0.01),), memory_gbps=0.1, costs=COSTS,
)  # fmt: skip
PACED = replace(MESH, links=(Link("node", "pair", ((1, 0.01),), 3.0),), gemm_gflops=(("any", 1),))


class Expected(NamedTuple):
    """What a span must be, and what it waits for: signals, and other spans of its rank."""

    name: str
    lane: str
    kind: str
    unit: str
    after: tuple[str, ...] = ()
    waits: tuple[Signal, ...] = ()
    raises: tuple[Signal, ...] = ()
    sources: tuple[Region, ...] = ()  # of a copy to a peer


def expected(program: Program, engine: str) -> list[Expected]:
    """Return the spans of a rank, in the order of its program."""
    if is_whole_call(program.entries):
        return [of_step(step) for step in read_back(program).steps]
    spans, last = [], {}
    for entry in program.entries:
        after = tuple(last[name] for name in entry.after)
        spans += of_entry(program.rank, entry, engine, after)
        last[entry.id] = spans[-1].name
    return spans


def of_step(step: Step) -> Expected:
    return Expected(
        step.id, step.lane, step.kind, step.unit,
        waits=step.signals if step.kind == "wait" else (),
        raises=step.signals if step.kind == "raise" else (),
        sources=step.reads if step.kind == "copy" else (),
    )  # fmt: skip


def of_entry(rank: int, entry: Entry, engine: str, after: tuple[str, ...]) -> list[Expected]:
    name, lane = entry.id, entry.lane
    if isinstance(entry, Copy):
        within = entry.target.rank == rank
        kind, unit = "local_copy" if within else "copy", copy_unit(engine, same_device=within)
        sources = () if within else (entry.source,)
        return [Expected(name, lane, kind, unit, after, sources=sources)]
    if isinstance(entry, Wait):
        return [Expected(name, lane, "wait", "none", after, waits=entry.signals)]
    if isinstance(entry, SignalWrite):
        return [Expected(name, lane, kind_of(entry), "none", after, raises=entry.raises)]
    if not isinstance(entry.work, Gated):
        return [Expected(name, lane, kind_of(entry), "sm", after)]
    step = read_back(Program(rank, cuda_target(), (), (entry,))).steps[0]
    return [
        Expected(f"{name}[{i}]", lane, "gemm", "sm", () if i else after, part.waits, part.raises)
        for i, part in enumerate(step.parts)
    ]


def check(plan: Plan, timeline: Timeline, machine: Machine) -> None:
    """Hold a timeline against what the programs of its plan demand, whatever things cost."""
    spans = {(span.rank, span.step): span for span in timeline.spans}
    programs = [compile_plan(e, simulated_target(machine, e.rank)) for e in plan.ranks]
    wanted = [(p.rank, one) for p in programs for one in expected(p, machine.engine)]
    assert sorted((r, one.name) for r, one in wanted) == sorted(spans)
    assert len(spans) == len(timeline.spans)
    assert list(timeline.spans) == sorted(timeline.spans, key=lambda s: (s.rank, s.start_us))
    raised = {signal: spans[rank, one.name].end_us for rank, one in wanted for signal in one.raises}
    lanes: dict[tuple[int, str], float] = {}
    item = {(e.rank, b.name): ELEMENT_BYTES[b.dtype] for e in plan.ranks for b in e.buffers}
    for rank, one in wanted:
        span = spans[rank, one.name]
        assert (span.lane, span.kind, span.unit) == (one.lane, one.kind, one.unit)
        assert lanes.get((rank, one.lane), 0.0) <= span.start_us <= span.end_us
        lanes[rank, one.lane] = span.end_us
        assert all(spans[rank, other].end_us <= span.start_us for other in one.after), one
        come = [raised[signal] for signal in one.waits if signal.name != "free"]
        met = span.end_us if one.kind == "wait" else span.start_us
        assert max(come, default=0.0) <= met
        assert span.bytes == sum(box.area * item[rank, box.buffer] for box in one.sources)


def is_refused(plan: Plan, machine: Machine) -> bool:
    """Return whether the machine's engine cannot run a plan; then it is not predicted either."""
    try:
        for entry in plan.ranks:
            compile_plan(entry, simulated_target(machine, entry.rank))
    except (ScheduleError, EngineError) as error:
        with pytest.raises(type(error)):
            simulate(plan, machine)
        return True
    return False


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "op, name",
    [(op, name) for op in DENSE for name in Schedule.names()]
    + [(op, name) for op in ROUTED for name in Schedule.names(op)],
)
def test_every_operator_and_schedule_comes_to_its_end(op: str, name: str, world: int) -> None:
    problem = Problem.chunked(op, world, 26, 12, 20, "bfloat16", bias=op == OPERATORS[0])
    for machine in (GPUS, PACED):
        schedule = Schedule.named(name).resolve(world, machine)
        if op in DENSE or name == "serial":
            schedule = replace(schedule, transport="dma")
        if (op, name) == ("embedding_all_to_all", "uniform_fused_2d"):
            with pytest.raises(ScheduleError):
                lower(problem, schedule)
            continue
        plan = lower(problem, schedule)
        bags = machine is GPUS and (op, name) == ("embedding_all_to_all", "gated_1d")
        assert is_refused(plan, machine) == (bags and world > 1), name
        if bags:
            continue
        for regime in REGIMES:
            timeline = simulate(plan, machine, regime)
            check(plan, timeline, machine)
            assert timeline == simulate(plan, machine, regime)
            assert timeline.simulated and not timeline.paced
            assert (timeline.engine, timeline.machine) == (machine.engine, machine.name)
        calls = [simulate_ms(plan, machine, regime) for regime in REGIMES]
        last = max(span.end_us for span in simulate(plan, machine).spans)
        assert calls[0] == pytest.approx((last + machine.costs.call_us) / 1e3)
        assert calls[0] <= calls[1] and (machine is PACED or calls[0] < calls[2])


@given(plans(max_world=5))
@settings(max_examples=60)
def test_so_do_any_others(plan: Plan) -> None:
    for machine in (GPUS, PACED):
        for regime in REGIMES if not is_refused(plan, machine) else ():
            check(plan, simulate(plan, machine, regime), machine)


def test_a_copy_may_end_as_the_rates_change() -> None:
    """Less than a byte of it is left when another ends, and nothing is under way but the two."""
    output = Output((0, 0, 3), "w0")
    problem = Problem("all_gather_matmul", 3, (2, 6, 4), 2, (output,), "float16")
    schedule = Schedule(grain=3, cut="columns", route="rotation", start="together")
    plan = lower(problem, schedule)
    check(plan, simulate(plan, GPUS), GPUS)


# ---- closed forms, of 1024 bytes a row, which a link moves in 10 us, and 8 us a row of a GEMM


def on(per: str) -> Machine:
    link = Link("node", per, ((1, 0.1024),), 5.0)
    return Machine("round", 1, 64, "cuda", (link,), gemm_gflops=(("any", 0.256),))


def last_end(name: str, per: str, world: int, rows: int) -> float:
    machine = on(per)
    problem = Problem.chunked("all_gather_matmul", world, rows * world, 4 * world, 256)
    schedule = replace(Schedule.named(name), grain=1, transport="dma").resolve(world, machine)
    return simulate(lower(problem, schedule), machine).duration_us


@pytest.mark.parametrize("world", [2, 3, 5, 8])
@pytest.mark.parametrize("rows", [1, 6])
def test_serial_is_the_transfer_and_the_gemm(world: int, rows: int) -> None:
    push, gemm = 10.0 * rows, 8.0 * rows * world
    # On a switch serial's route is rotation: world - 1 turns.
    assert last_end("serial", "pair", world, rows) == pytest.approx(5 + push + gemm)
    turns = (world - 1) * (5 + push)
    assert last_end("serial", "port", world, rows) == pytest.approx(turns + gemm)


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_shards_in_rotation_hide_their_gemms(world: int) -> None:
    # A shard comes every 65 us and takes 48: its GEMM ends before the next one comes.
    for per in ("pair", "port"):
        assert last_end("shard_p2p", per, world, 6) == pytest.approx((world - 1) * 65 + 48)


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_a_mesh_brings_all_shards_at_once(world: int) -> None:
    # After 65 us, in which the own shard is done; on a switch they share the ports.
    assert last_end("hetero_unfused_1d", "pair", world, 6) == pytest.approx(65 + 48 * (world - 1))


def test_a_finer_grain_shortens_what_cannot_be_hidden() -> None:
    machine, world, rows = on("pair"), 4, 8
    problem = Problem.chunked("all_gather_matmul", world, rows * world, 4 * world, 256)
    for grain in (1, 2, 4, 8):
        schedule = replace(Schedule.named("uniform_fused_1d"), grain=grain).resolve(world, machine)
        push, gemm = 5 + 10.0 * rows / grain, 8.0 * rows * world / grain
        longer = max(push, gemm)
        expected = push + (grain - 1) * longer + gemm
        timeline = simulate(lower(problem, schedule), machine)
        assert timeline.duration_us == pytest.approx(expected), grain


def span_of(timeline: Timeline, rank: int, step: str) -> Span:
    return next(s for s in timeline.spans if (s.rank, s.step) == (rank, step))


def test_a_sum_comes_after_the_last_partial_sum() -> None:
    machine = on("pair")
    problem = Problem.chunked("matmul_reduce_scatter", 2, 4, 256, 8)
    schedule = Schedule.named("shard_p2p").resolve(2, machine)
    timeline = simulate(lower(problem, schedule), machine)
    made = 2.0 * 2 * 256 * 4 / 256  # the peer's two rows: two of 1024 bytes
    push = span_of(timeline, 0, "push.0to1")
    assert (push.start_us, push.end_us) == pytest.approx((made, made + 5 + 20))
    assert timeline.duration_us == pytest.approx(made + 25)
