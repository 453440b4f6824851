"""Measurement on the host engine: all ranks in this process; results are checked in float64."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ficco.api.node import Node
from ficco.cli.sweeping.points import Case, Point
from ficco.cli.sweeping.results import points_to_time, screens, undrawn
from ficco.cli.sweeping.simulated import predict, timeline_json
from ficco.cli.sweeping.work import Work
from ficco.core.errors import FiccoError
from ficco.engine import available_memory
from ficco.operators import oracle
from ficco.operators.problem import Problem
from ficco.plan.timeline import alone_ms

_WARM, _SCREENING, _TIMED = 0, 1, 2  # a round's purpose, which determines its inputs
Inputs = Sequence[Mapping[str, Any]]


def measure(work: Work) -> bool:
    """Measure all missing points; return False if the time ran out."""
    with Node(work.world, machine=work.machine, timeout_s=work.timeout_s) as node:
        for case in work.remaining():
            if not _Measuring(work, node, case).done():
                return False
            predict(work, case)
            work.end(case)
    return True


class _Measuring:
    """The measurement of one case."""

    def __init__(self, work: Work, node: Node, case: Case) -> None:
        self._work, self._node, self._case = work, node, case
        self._warm: set[str] = set()

    def done(self) -> bool:
        """Run all missing rounds; return False if the time ran out."""
        work, grid, journal = self._work, self._work.grid, self._work.journal
        if grid.screening:
            for number in range(grid.screening):
                missing = [
                    point
                    for point in work.able(self._case)
                    if screens(point, grid) and number not in journal.screens.get(point.id, {})
                ]
                if not self._round(missing, number, _SCREENING):
                    return False
        points = [
            point
            for regime in self._case.regimes
            for point in points_to_time(self._case.of(regime), journal, grid)
        ]
        for number in range(grid.rounds):
            missing = [
                point
                for point in points
                if point.id not in journal.bad and number in journal.missing(point.id, grid.rounds)
            ]
            if not self._round(missing, number, _TIMED):
                return False
        self._timelines()
        return True

    def _round(self, points: list[Point], number: int, purpose: int) -> bool:
        """Run each point once, in this round's order; return False if the time ran out."""
        if not points:
            return True
        if self._work.late:
            return False
        cold = [point for point in points if point.id not in self._warm]
        if cold and not self._go(cold, 0, _WARM):
            return False
        self._warm |= {point.id for point in cold}
        return self._go(points, number, purpose)

    def _go(self, points: list[Point], number: int, purpose: int) -> bool:
        problem = self._case.shape.problem
        order = sorted(points, key=lambda point: point.id)
        random.Random(f"{self._case.shape.id} {purpose} {number}").shuffle(order)
        try:
            available_memory.check_host(
                oracle.bytes_needed(problem), "inputs and results of all ranks"
            )
            inputs = oracle.inputs(problem, 10_000 * purpose + number)
            exact = oracle.results(problem, inputs)
        except MemoryError as error:
            for point in order:
                reason = f"not enough memory for these sizes ({error})"
                self._work.refuse(point, reason, "impossible")
            return True
        for point in order:
            if self._work.late:
                return False
            if point.id not in self._work.journal.bad:
                self._run(problem, inputs, exact, point, number, purpose)
        return True

    def _run(
        self, problem: Problem, inputs: Inputs, exact: list[list[oracle.Exact]], point: Point,
        number: int, purpose: int,
    ) -> None:  # fmt: skip
        """Make one call, and record its time and its error, or why it failed."""
        work, shape = self._work, self._case.shape.id
        schedule = point.schedule
        assert schedule is not None, point.id
        begin = time.perf_counter()
        try:
            outputs = self._node.run(problem, inputs, schedule=schedule)
        except MemoryError as failure:
            work.refuse(point, f"not enough memory for these sizes ({failure})", "impossible")
            return
        except FiccoError as failure:
            work.refuse(point, f"{type(failure).__name__}: {failure}", "failed")
            self._node.reset()
            return
        ms = 1e3 * (time.perf_counter() - begin)
        ok, error = oracle.judged(problem, outputs, exact, schedule.sums_travel)
        if not ok:
            work.refuse(point, f"its result is wrong: relative error {error:.3g}", "wrong")
            return
        if purpose == _WARM:
            work.journal.append(shape, id=point.id, error=error)
            return
        run_field = {"run": number} if purpose == _TIMED else {"screen": number}
        if purpose == _TIMED and point.name == "serial":
            parts = alone_ms(self._node.timeline())
            for part, part_ms in zip(("gemm", "transfer"), parts, strict=True):
                work.journal.append(shape, part=part, run=number, ms=part_ms)
        work.journal.append(shape, id=point.id, **run_field, ms=ms, error=error)
        work.progress.run(shape)

    def _timelines(self) -> None:
        """Record the timelines of the best and the worst point, with one more call each."""
        work, shape = self._work, self._case.shape
        for regime, which, point in undrawn(self._case, work.journal, work.grid):
            inputs = oracle.inputs(shape.problem, 0)
            try:
                self._node.run(shape.problem, inputs, schedule=point.schedule)
            except FiccoError as error:
                work.progress.say(f"{point.id}: no timeline: {error}")
                self._node.reset()
                continue
            table = timeline_json(self._node.timeline())
            work.journal.append(shape.id, regime=regime, which=which, id=point.id, timeline=table)
