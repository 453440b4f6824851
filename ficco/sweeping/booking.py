"""A sweep's book: the fastest schedule for every shape and regime, in the selector's format."""

from __future__ import annotations

from collections.abc import Iterable

from ficco import __version__
from ficco.machine import Machine
from ficco.problem import Problem
from ficco.schedule import Schedule
from ficco.selector.book import KERNELS, Book, Point
from ficco.sweeping.grid import AUTO
from ficco.sweeping.results import Line

__all__ = ["book_of"]


def book_of(
    results: Iterable[Line], machine: Machine, driver: str, date: str, name: str
) -> Book | None:
    """Return the book of a sweep's results; None if no shape has all its runs.

    Only points with all rounds count. Where nothing is faster than serial, serial is in the book.

    Args:
        results: the measured results.
        machine: the profile; the selector finds the book by its name.
        driver: the driver's CUDA version, or "host".
        date: date of the measurement.
        name: the book's name in messages.
    """
    shape: Line = {}
    best: dict[tuple[str, str], Line] = {}
    serial: dict[tuple[str, str], Line] = {}
    shapes: dict[tuple[str, str], Line] = {}
    for line in results:
        if line["kind"] == "shape":
            shape = line
        if line["kind"] != "point" or line["screened"]:
            continue
        key = (line["shape"], line["regime"])
        shapes[key] = shape
        if line["name"] == "serial":
            serial[key] = line
        if key not in best or line["ms"] < best[key]["ms"]:
            best[key] = line
    points = [_point(shapes[key], serial[key], line) for key, line in best.items() if key in serial]
    if not points:
        return None
    return Book(
        name, machine.name, __version__, driver, date, tuple(points), KERNELS, machine.signals
    )


def _point(shape: Line, serial: Line, best: Line) -> Point:
    sizes = (shape["op"], shape["world"], shape["m"], shape["n"], shape["k"], shape["dtype"])
    schedule = Schedule.from_toml(best["schedule"], AUTO)
    problem = Problem.chunked(*sizes)
    return Point.measured(problem, shape["regime"], best["ms"], serial["ms"], schedule)
