"""Simulation of points: for simulated sweeps, and as predictions for measured ones.

DIL is the loss of a GEMM by decomposition: the time of its pieces alone over that of the whole
alone. CIL is the loss by contention: the time of the pieces in the call over that of the pieces
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ficco.cli.sweeping.points import Case, Point
from ficco.cli.sweeping.results import undrawn
from ficco.cli.sweeping.work import Work
from ficco.core.errors import FiccoError
from ficco.core.machine import Machine
from ficco.lowering import lower
from ficco.measure import simulator
from ficco.plan import Plan
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import Timeline, alone_ms

_DIGITS = 6


def simulate(work: Work) -> bool:
    """Simulate all missing points; return False if the time ran out."""
    for case in work.remaining():
        sums = _Sums(case, work.machine)
        for point in work.able(case):
            if work.late:
                return False
            if work.journal.missing(point.id, 1):
                _simulate(work, sums, point)
                work.progress.run(case.shape.id)
        for regime, which, point in undrawn(case, work.journal, work.grid):
            table = timeline_json(sums.timeline(point, work.machine))
            work.journal.append(
                case.shape.id, regime=regime, which=which, id=point.id, timeline=table
            )
        work.end(case)
    return True


def _simulate(work: Work, sums: _Sums, point: Point) -> None:
    shape = point.shape.id
    try:
        figures = {**sums.losses(point), "predicted_ms": sums.ms(point)}
        if point.name == "serial":
            timeline = sums.timeline(point, work.machine)
            for part, ms in zip(("gemm", "transfer"), alone_ms(timeline), strict=True):
                work.journal.append(shape, part=part, run=0, ms=round(ms, _DIGITS))
    except FiccoError as error:
        work.refuse(point, str(error), "impossible")
        return
    work.journal.append(shape, id=point.id, **figures)
    work.journal.append(shape, id=point.id, run=0, ms=figures["predicted_ms"])


def predict(work: Work, case: Case) -> None:
    """Record the simulator's times on the profile for a case's points that have figures."""
    if work.profile is None:
        return
    sums = _Sums(case, work.profile)
    for point in work.able(case):
        timed = point.id in work.journal.runs or point.id in work.journal.screens
        if not timed or "predicted_ms" in work.journal.worked_out.get(point.id, {}):
            continue
        try:
            ms: float | None = sums.ms(point)
        except FiccoError:
            ms = None  # the profile lacks rates of this schedule
        work.journal.append(case.shape.id, id=point.id, predicted_ms=ms)


def timeline_json(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as JSON values, to a hundredth of a microsecond."""
    spans = [
        {**asdict(span), "start_us": round(span.start_us, 2), "end_us": round(span.end_us, 2)}
        for span in timeline.spans
    ]
    return {**asdict(replace(timeline, spans=())), "origin_us": 0.0, "spans": spans}


class _Sums:
    """Simulates the points of one case; a schedule's plan is built once for all regimes."""

    def __init__(self, case: Case, machine: Machine) -> None:
        self._case, self._machine = case, machine
        costs = replace(machine.costs, gemm_beside_copies=1.0)
        self._quiet = replace(machine, costs=costs)
        self._plans: dict[Schedule, Plan] = {}

    def ms(self, point: Point) -> float:
        """Return the predicted time of a call, in ms."""
        schedule = self._schedule(point)
        ms = simulator.simulate_ms(self._plan(schedule), self._machine, point.regime)
        return round(ms, _DIGITS)

    def timeline(self, point: Point, machine: Machine) -> Timeline:
        """Return the predicted timeline of a call."""
        return simulator.simulate(self._plan(self._schedule(point)), machine, point.regime)

    def losses(self, point: Point) -> Mapping[str, float | None]:
        """Return DIL and CIL; None if there is no GEMM."""
        serial = next(p for p in self._case.points if p.name == "serial")
        serial = replace(serial, regime=point.regime)
        whole, _ = alone_ms(self.timeline(serial, self._quiet))
        pieces, _ = alone_ms(self.timeline(point, self._quiet))
        beside, _ = alone_ms(self.timeline(point, self._machine))
        return {
            "dil": round(pieces / whole, 4) if whole else None,
            "cil": round(beside / pieces, 4) if pieces else None,
        }

    def _schedule(self, point: Point) -> Schedule:
        assert point.schedule is not None, point.id
        return point.schedule

    def _plan(self, schedule: Schedule) -> Plan:
        if schedule not in self._plans:
            self._plans[schedule] = lower(self._case.shape.problem, schedule)
        return self._plans[schedule]
