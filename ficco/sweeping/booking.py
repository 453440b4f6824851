"""A sweep's book: for every shape and regime what was fastest here, as the selector takes it."""

from __future__ import annotations

from collections.abc import Iterable

from ficco import __version__
from ficco.problem import Problem
from ficco.schedule import Schedule
from ficco.selector.book import Book, Point
from ficco.sweeping.grid import AUTO
from ficco.sweeping.results import Line

__all__ = ["book_of"]


def book_of(found: Iterable[Line], machine: str, driver: str, date: str, name: str) -> Book | None:
    """Return the book of a sweep's results; None where no shape has all its runs.

    Only what ran all rounds counts. Where nothing is faster than serial, serial is in the book.

    Args:
        found: the results, which were measured.
        machine: the profile's name, by which the selector finds the book.
        driver: CUDA version that the driver served, or "host".
        date: of the measurement.
        name: how messages call the book.
    """
    shape: Line = {}
    best: dict[tuple[str, str], Line] = {}
    serial: dict[tuple[str, str], Line] = {}
    shapes: dict[tuple[str, str], Line] = {}
    for line in found:
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
    return Book(name, machine, __version__, driver, date, tuple(points))


def _point(shape: Line, serial: Line, best: Line) -> Point:
    sizes = (shape["op"], shape["world"], shape["m"], shape["n"], shape["k"], shape["dtype"])
    schedule = Schedule.from_toml(best["schedule"], AUTO)
    problem = Problem.chunked(*sizes)
    return Point.measured(problem, shape["regime"], best["ms"], serial["ms"], schedule)
