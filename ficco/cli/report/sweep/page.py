"""The page: templates render its head and its sections to one HTML file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ficco.cli.report.sweep import figures, judging, naming
from ficco.cli.report.sweep.drawing import svg
from ficco.cli.report.sweep.judging import by_loss, gain
from ficco.cli.report.sweep.naming import full, number, operator_label, short
from ficco.cli.report.sweep.reading import Case, Point, Sweep
from ficco.core import data
from ficco.core.errors import InputError

MOST_BYTES = 4_800_000  # browsers open this quickly, and mail systems accept it
_MOST_LOST = 8  # choices in the table of those that lose most, by method


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a page's contents, which bound its size.

    Attributes:
        cases: rows of tables with a row per case.
        drawn: cases in one plot.
        curves: cases with their own grain curves.
        timelines: cases with timelines.
        points: rows in tables of points, over all cases.
        marks: single points in one plot.
        bad: bad points.
    """

    cases: int = 1000
    drawn: int = 40
    curves: int = 24
    timelines: int = 8
    points: int = 6000
    marks: int = 4000
    bad: int = 400

    def halved(self) -> Limits:
        """Return limits of half the size."""
        return Limits(*(max(1, getattr(self, name) // 2) for name in self.__slots__))


def page(sweep: Sweep) -> str:
    """Return a sweep's page as self-contained HTML.

    The page shows as much as fits into MOST_BYTES, and says what is left out.
    """
    limits = Limits()
    while True:
        text = _rendered(sweep, limits)
        if len(text.encode()) <= MOST_BYTES or limits.cases == 1:
            return text
        limits = limits.halved()


def _rendered(sweep: Sweep, limits: Limits) -> str:
    """Render the templates, which call the functions of `judging`, `naming` and this module."""
    environment = Environment(
        loader=PackageLoader(__package__, ""), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    functions = {
        function.__name__: function
        for module in (judging, naming)
        for function in vars(module).values()
        if getattr(function, "__module__", "") == module.__name__
    }
    environment.filters |= functions
    environment.tests |= {
        "loses": judging.loses,
        "within": judging.within,
        "gaining": lambda case: gain(case) is not None,
        "winning": lambda case: judging.best(case) is not None,
    }
    environment.globals |= functions | {
        "NONE": naming.NONE, "REGIMES": naming.REGIMES, "figures": figures, "svg": svg,
        "busy": figures.busy, "last_rank": figures.last_rank, "described": _described,
        "labels": _labels, "longest_us": _longest_us, "machine_of": _machine,
        "most_lost": _most_lost, "most_telling": _most_telling, "spread_out": _spread_out,
        "short_of": _short_of, "thinned": _thinned,
    }  # fmt: skip
    curves, listed = _cases_of_grains(sweep.cases, limits)
    return environment.get_template("page.html").render(
        sweep=sweep,
        limits=limits,
        regimes=list(dict.fromkeys(case.regime for case in sweep.cases)),
        facts=_facts(sweep.head),
        words=_words(sweep),
        curves=curves,
        listed=listed,
        anchors={
            (case.shape, case.regime): f"case-{number}"
            for number, case in enumerate(sweep.cases)
            if any(case is each for each in (*curves, *listed))
        },
    )


# ---- the choice of what is shown


def _cases_of_grains(cases: Sequence[Case], limits: Limits) -> tuple[list[Case], list[Case]]:
    """Return the cases that get a curve, and those that only get a table of points."""
    drawn: list[Case] = []
    listed: list[Case] = []
    left = limits.points
    for case in by_loss(case for case in cases if case.points):
        left -= len(case.points)
        if left < 0 and (drawn or listed):
            break
        several = len({p.grain for p in case.points if p.ok and p.name not in ("serial", "auto")})
        (drawn if several > 1 and len(drawn) < limits.curves else listed).append(case)
    return drawn, listed


def _spread_out(cases: Sequence[Case], most: int) -> list[Case]:
    """Return `most` cases in order: losing ones first (up to half), then the others evenly."""
    if len(cases) <= most:
        return list(cases)
    losing_cases = [case for case in cases if judging.loses(case)][: most // 2]
    others = cases[len(losing_cases) :]
    step = (len(others) - 1) / max(1, most - len(losing_cases) - 1)
    return losing_cases + [others[round(i * step)] for i in range(most - len(losing_cases))]


def _most_telling(traced: Sequence[Case], most: int) -> list[Case]:
    """Return the cases whose timelines are shown: the largest losses, then the largest gains."""
    ranked = by_loss(traced)
    if len(ranked) <= most:
        return ranked
    losers = [c for c in ranked if (g := gain(c)) is not None and g < 1][: -(-most // 2)]
    rest = [c for c in reversed(ranked) if c not in losers and gain(c) is not None]
    return losers + rest[: most - len(losers)]


def _most_lost(methods: Sequence[judging.Choosing]) -> list[tuple[str, judging.Taken]]:
    """Return the choices that lose most, each with the name of its method."""
    return [
        (method.name, taken)
        for method in methods
        for taken in method.taken[:_MOST_LOST]
        if taken.loss > 0
    ]


def _thinned(points: Sequence[Point], most: int) -> Sequence[Point]:
    """Return at most `most` points, evenly chosen."""
    return points[:: -(-len(points) // most)]


# ---- texts


def _described(case: Case) -> str:
    """Return a case in words, with the times of serial and ideal."""
    parts = [full(case)]
    for label, value in (("serial", case.serial_ms), ("ideal", case.ideal_ms)):
        parts.append(f"{label} {number(value)} ms" if value else f"{label} not known")
    return "; ".join(parts)


def _labels(points: Sequence[Point]) -> dict[str, str]:
    """Return names with grains by id, and the axes in which points of one name and grain differ."""
    labels = {}
    for point in points:
        twins = [p for p in points if p.kind == point.kind]
        axes = [
            f"{axis} {value}"
            for axis, value in point.schedule.items()
            if any(twin.schedule.get(axis) != value for twin in twins)
        ]
        labels[point.id] = f"{point.label} ({', '.join(axes)})" if axes else point.label
    return labels


def _longest_us(case: Case) -> float:
    """Return the last end of a case's timelines, which share a scale."""
    return max((span.end_us for each in case.traced for span in each.timeline.spans), default=1.0)


def _short_of(sweep: Sweep, shape: str) -> str:
    """Return a shape in short form, or its id if no case has it."""
    return next((short(case) for case in sweep.cases if case.shape == shape), shape)


def _machine(head: Mapping[str, Any]) -> str:
    """Return the GPUs that ran, or the profile that was simulated or run as."""
    gpus = head.get("gpus")
    if gpus and head["how"] == "executed":
        count = head.get("world", len(gpus))
        return f"{count} {' or '.join(sorted({str(gpu['name']) for gpu in gpus}))}"
    return str(head["machine"].get("name", "a machine without a name"))


def _facts(head: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine = head["machine"]
    about, devices = machine.get("about"), machine.get("devices")
    facts = [("machine", str(machine.get("name", "")) + (f": {about}" if about else ""))]
    if devices is not None and not head.get("gpus"):
        facts.append(("devices", str(devices)))
    for name, title in (
        ("gpus", "gpus"), ("cpu", "cpu"), ("cores", "cores"), ("kernel", "kernel"),
        ("driver", "driver"), ("profile", "predictions from profile"), ("date", "date"),
        ("ficco", "ficco"), ("versions", "versions"), ("grid", "grid"), ("digest", "grid's digest"),
    ):  # fmt: skip
        if head.get(name) is not None and (name, head["how"]) != ("driver", "simulated"):
            facts.append((title, _plain(head[name])))
    return facts


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {entry}" for name, entry in value.items())
    if not isinstance(value, list):
        return str(value)
    counts = Counter(map(_plain, value))  # most GPUs of a machine are equal
    return "; ".join(f"{count} x {text}" if count > 1 else text for text, count in counts.items())


def _words(sweep: Sweep) -> list[tuple[str, str]]:
    """Return the names of schedules and operators, and what they mean."""
    rows = []
    for name in dict.fromkeys(p.name for case in sweep.cases for p in case.points):
        try:
            about = str(data.load("named", name, "schedule", InputError).get("about", ""))
        except InputError:
            about = "ficco's own choice" if name == "auto" else "defined in this sweep's grid"
        rows.append((name, about))
    return rows + [(operator_label(op), op) for op in dict.fromkeys(c.op for c in sweep.cases)]
