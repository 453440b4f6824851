"""Measure schedules in rounds: all schedules and serial run in turn, and every result is checked.

An Executor decides where the ranks run: threads of a node, one process each, or one GPU each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ficco.cli.arguments import Request
from ficco.cli.progress_line import Working
from ficco.core.dtypes import DTYPES
from ficco.lowering.lowered import Lowered
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import Timeline, alone_ms

if TYPE_CHECKING:
    from ficco.api.node import Node
    from ficco.measure.executors import GpuExecutor, RankExecutor
from ficco.core.errors import InputError

Inputs = Sequence[Mapping[str, Any]]


class NodeExecutor:
    """Runs problems on all ranks, in this process, and measures them.

    The executors of `ficco.measure.executors` run one rank of a group each, and combine their
    measurements.

    Attributes:
        ranks: the ranks whose results it holds.
        leads: whether this executor prints.
    """

    leads = True

    def __init__(self, node: Node) -> None:
        from ficco.api.node import run_lowered

        self._node, self._run = node, run_lowered
        self.ranks: Sequence[int] = range(node.world)

    def check_room(self, problem: Problem) -> None:
        """Raise MemoryError if the problem's data does not fit; call before allocation."""
        from ficco.engine.available_memory import check_host
        from ficco.operators import oracle

        check_host(oracle.bytes_needed(problem), "inputs and results of all ranks")

    def inputs(self, problem: Problem, seed: int) -> list[dict[str, Any]]:
        """Return all ranks' inputs, in the memory that `run` and the oracle read."""
        from ficco.operators import oracle

        return oracle.inputs(problem, seed)

    def run(self, lowered: Lowered, given: Inputs, traced: bool) -> list[list[Any]]:
        """Run to completion and return the outputs of `ranks`; `traced`: record times."""
        return self._run(self._node, lowered, given)

    def alone(self, problem: Problem, given: Inputs) -> Sequence[float] | None:
        """Return the times of the whole compute and the whole transfer, each alone, in ms.

        None: use serial's timeline.
        """
        return None

    def meet(self) -> None:
        """Wait for all other executors of the group."""

    def most(self, values: Sequence[float]) -> list[float]:
        """Return each value's maximum over all executors."""
        return list(values)

    def total(self, values: Sequence[int]) -> list[int]:
        """Return each value's sum over all executors."""
        return list(values)

    def timeline(self) -> Timeline | None:
        """Return the last run's timeline, of `ranks`; None: no times were recorded."""
        return self._node.timeline()

    def joined(self, timeline: Timeline) -> Timeline:
        """Join the executors' timelines to one of all ranks."""
        return timeline


Executor: TypeAlias = "NodeExecutor | RankExecutor | GpuExecutor"


class PlanExecutor(NodeExecutor):
    """All ranks in this process, for a plan from a file beside those of `ficco.lower`."""

    def __init__(self, node: Node, by_hand: Lowered) -> None:
        super().__init__(node)
        self._by_hand = by_hand

    def run(self, lowered: Lowered, given: Inputs, traced: bool) -> list[list[Any]]:
        """See `NodeExecutor.run`. The plan was verified before."""
        if lowered is self._by_hand:
            return self._node.run(lowered.plan, given, verify=False)
        return super().run(lowered, given, traced)


@dataclass(slots=True)
class Row:
    """One schedule's result, with the JSON's keys; simulated results have no error."""

    schedule: str
    grain: int
    serial_ms: float = 0.0
    overlap_ms: float = 0.0
    speedup: float = 0.0
    ideal_ms: float = 0.0
    efficiency: float = 0.0
    max_rel_error: float | None = 0.0
    ok: bool = True
    copies: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Point:
    """A schedule under measurement with its plans, and its fastest run with times, if any."""

    lowered: Lowered
    row: Row
    times_ms: list[float] = field(default_factory=list)
    best: Timeline | None = None


def measure(executor: Executor, request: Request, iters: int, seed: int) -> list[Point]:
    """Run all schedules in turn, round by round, with new inputs in each round.

    Returns the points with their rows filled in, `serial` first, whether it was requested or not.
    The ideal time is the longer of the whole compute and the whole transfer, each alone: as the
    executor measured them at the start, else as they ran within serial.
    """
    with Working("ficco run", executor.leads) as work:
        return _measured(executor, request, iters, seed, work)


def _measured(
    executor: Executor, request: Request, iters: int, seed: int, work: Working
) -> list[Point]:
    from ficco.operators import oracle

    p = request.problem
    executor.check_room(p)
    points = points_of(request)
    counts = [n for point in points for n in copies_and_bytes(point.lowered, executor.ranks)]
    totals = iter(executor.total(counts))
    for point in points:
        point.row.copies, point.row.bytes = next(totals), next(totals)
    alone: list[Sequence[float]] = []
    for round_number in range(iters + 1):  # round 0 warms up; it is checked, not timed
        work.say(f"round {round_number} of {iters}: inputs and exact results")
        inputs = executor.inputs(p, seed + 1000 * round_number)
        exact = oracle.results(p, inputs, executor.ranks)
        measured = executor.alone(p, inputs) if round_number == 0 else None
        if measured is not None:
            alone.append(executor.most(measured))
        for point in points:
            schedule = point.lowered.schedule
            work.say(f"round {round_number} of {iters}: {schedule.name}")
            executor.meet()
            begin_s = time.perf_counter()
            outputs = executor.run(point.lowered, inputs, traced=round_number == 0)
            elapsed_ms = 1e3 * (time.perf_counter() - begin_s)
            verdict = oracle.judged(p, outputs, exact, schedule.sums_travel)
            timeline = executor.timeline()
            wrong, error, elapsed_ms, *alone_parts = executor.most(
                [float(not verdict.ok), verdict.max_rel_error, elapsed_ms, *alone_ms(timeline)]
            )
            point.row.ok = point.row.ok and not wrong
            point.row.max_rel_error = max(point.row.max_rel_error or 0.0, error)
            fastest = not point.times_ms or elapsed_ms < min(point.times_ms)
            if timeline is not None and fastest:
                point.best = timeline
            if round_number == 0:
                continue
            point.times_ms.append(elapsed_ms)
            if point is points[0] and timeline is not None:
                alone.append(alone_parts)
    ideal_ms = max(statistics.median(outputs) for outputs in zip(*alone, strict=True))
    serial_ms = statistics.median(points[0].times_ms)
    for point in points:
        finish(point.row, point.times_ms, serial_ms, ideal_ms)
    return points


def points_of(request: Request) -> list[Point]:
    """Return the points to measure or to predict: `serial` first, then all others."""
    p, machine = request.problem, request.machine
    serial = Schedule.named("serial").resolve(p.world, machine)
    first, others = Lowered(p, serial), list(request.lowered)
    if not request.by_hand and serial in request.schedules:
        first = others.pop(request.schedules.index(serial))
    points = []
    for lowered in (first, *others):  # a schedule in a file may leave values to the machine
        schedule = lowered.schedule.resolve(p.world, machine)
        points.append(Point(lowered, Row(schedule.name, schedule.chunks)))
    return points


def requested(request: Request, points: list[Point]) -> list[Point]:
    """Return the points of `points_of` without `serial` if it was not requested."""
    with_serial = request.by_hand or points[0].lowered in request.lowered
    return points if with_serial else points[1:]


def copies_and_bytes(lowered: Lowered, ranks: Sequence[int]) -> tuple[int, int]:
    """Return how many copies the plans of some ranks have, and how many bytes they write."""
    pushed = [
        region.area * DTYPES[lowered.problem.dtype]
        for rank in ranks
        for step in lowered.rank(rank).steps
        if step.kind == "copy"
        for region in step.writes
    ]
    return len(pushed), sum(pushed)


def finish(row: Row, times_ms: list[float], serial_ms: float, ideal_ms: float) -> None:
    """Fill in the medians of the times and the figures derived from them."""
    row.serial_ms = serial_ms
    row.overlap_ms = statistics.median(times_ms)
    row.speedup = serial_ms / row.overlap_ms
    row.ideal_ms = ideal_ms
    row.efficiency = ideal_ms / row.overlap_ms


# ---- predictions


def simulated(request: Request, regime: str) -> list[Point]:
    """Return the points with predicted times, `serial` first.

    The ideal time is the longer of the predicted times of serial's compute and serial's transfer.

    Raises:
        InputError: the machine has no rates, or too few devices.
    """
    points = points_of(request)
    with Working("ficco run") as work:
        _predict(request, regime, points, work)
    ideal_ms = max(alone_ms(points[0].best))
    (serial_ms,) = points[0].times_ms
    for point in points:
        finish(point.row, point.times_ms, serial_ms, ideal_ms)
    return points


def _predict(request: Request, regime: str, points: list[Point], work: Working) -> None:
    from ficco.measure import simulator
    from ficco.verifier import verify

    machine = request.machine
    for number, point in enumerate(points, 1):
        work.say(f"simulates and proves schedule {number} of {len(points)}")
        point.row.max_rel_error = None
        lowered = point.lowered
        point.best, call_ms = simulator.simulate_call(lowered.plan, machine, regime)
        point.times_ms = [call_ms]
        ranks = range(request.problem.world)
        point.row.copies, point.row.bytes = copies_and_bytes(lowered, ranks)
        if request.by_hand and point is not points[0]:
            continue  # it was verified before, or is not to be
        point.row.ok = not verify(lowered.plan)
        lowered.release()


def check_alone(**options: object) -> None:
    """Refuse options that apply to real runs only.

    Raises:
        InputError: such an option was given.
    """
    for option, value in options.items():
        if value:
            raise InputError(f"--{option} with --simulate: nothing runs; leave one of the two out")
