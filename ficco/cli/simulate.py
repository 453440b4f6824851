"""`ficco run --simulate`: predict the points of a run, and verify their plans."""

from __future__ import annotations

from ficco import simulator
from ficco.cli.arguments import Request
from ficco.cli.measure import Point, copies_and_bytes, finish, points_of
from ficco.cli.progress_line import Working
from ficco.errors import InputError
from ficco.timeline import alone_ms
from ficco.verifier import verify

__all__ = ["check_alone", "simulated"]


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
