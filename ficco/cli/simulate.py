"""`ficco run --simulate`: the same points as a run, predicted; their plans are proved instead."""

from __future__ import annotations

from ficco import simulator
from ficco.cli.arguments import Asked
from ficco.cli.measure import Point, finish, row_of
from ficco.cli.progress_line import Working
from ficco.errors import InputError
from ficco.lowering import lower
from ficco.schedule import Schedule
from ficco.timeline import alone_ms
from ficco.verifier import verify

__all__ = ["check_alone", "simulated"]


def simulated(asked: Asked, regime: str) -> list[Point]:
    """Return the points that were asked for, with predicted times.

    The ideal time is the longer of serial's compute and serial's transfer, as they are predicted.

    Raises:
        InputError: the machine has no rates, or too few devices.
    """
    p = asked.problem
    serial = Schedule.named("serial").resolve(p.world, asked.machine)
    others = [schedule for schedule in asked.schedules if schedule != serial]
    points = [Point(s, row_of(p, s)) for s in [serial, *others]]
    with Working("ficco run") as work:
        _predict(asked, regime, points, work)
    ideal_ms = max(alone_ms(points[0].best))
    (serial_ms,) = points[0].times_ms
    for point in points:
        finish(point.row, point.times_ms, serial_ms, ideal_ms)
    return points if serial in asked.schedules else points[1:]


def _predict(asked: Asked, regime: str, points: list[Point], work: Working) -> None:
    p = asked.problem
    for number, point in enumerate(points, 1):
        work.say(f"simulates and proves schedule {number} of {len(points)}")
        point.best = simulator.predict(p, point.schedule, asked.machine, regime)
        point.times_ms = [simulator.predict_ms(p, point.schedule, asked.machine, regime)]
        point.row.max_rel_error = None
        point.row.ok = _proved(asked, point.schedule)


def _proved(asked: Asked, schedule: Schedule) -> bool:
    """Whether the verifier finds a schedule's plan right; a collective has none to be wrong."""
    if schedule.transport == "collective":
        return True
    return not verify(lower(asked.problem, schedule))


def check_alone(**given: object) -> None:
    """Refuse options that are for real runs.

    Raises:
        InputError: one was given.
    """
    for option, value in given.items():
        if value:
            raise InputError(f"--{option} with --simulate: nothing runs; leave one of the two out")
