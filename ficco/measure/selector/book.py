"""Books: the best measured schedule of each shape, on one machine.

A book is one TOML file, in schedules/tuned or supplied by the user:

    machine = "h200x4"
    ficco = "0.1.0"
    driver = "13.0"         # the CUDA version that the driver supports
    date = "2026-11-21"
    kernels = 1             # KERNELS of that version; default 1
    signals = "write"       # the kind of signals at peers; default "write"

    [[points]]
    op = "all_gather_matmul"
    dtype = "bfloat16"
    regime = "captured"
    ranks = 4
    m = 8192                # all sizes are of one rank's whole GEMM
    n = 2560
    k = 8192
    piece_bytes = 33554432  # bytes that a rank sends to each peer, on average
    ms = 0.497
    serial_ms = 0.803
    schedule = { name = "hetero_fused_1d", grain = 2, ... }

A point is used for shapes in its neighbourhood: the same operator, dtype, ranks and regime, and
all sizes within a factor of NEAR. A book is used only on its own machine, with the same kernels,
the same kind of signals, and a driver of the same major version. If the minor version of the driver
differs, the book is used, and the choice reports it. The version of ficco is for information.
"""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ficco.core import data, reading
from ficco.core.dtypes import DTYPES
from ficco.core.errors import InputError, closest, shown
from ficco.core.machine import Machine
from ficco.measure.selector.facts import Facts, facts_of
from ficco.operators import registry
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import REGIMES

NEAR = 1.25
KERNELS = 1  # increased when a change of kernels makes earlier measurements invalid
NAMED_FIELDS = ("op", "dtype", "regime")
SIZES = ("ranks", "m", "n", "k", "piece_bytes")


@dataclass(frozen=True, slots=True)
class Point:
    """A measured shape and its best schedule.

    Attributes:
        op, dtype, regime, ranks: as in the file.
        m, n, k: sizes of one rank's whole GEMM.
        piece_bytes: bytes that a rank sends to each peer, on average.
        ms: median ms of a call with `schedule`; `serial_ms`: with serial.
        schedule: the best schedule, resolved.
    """

    op: str
    dtype: str
    regime: str
    ranks: int
    m: int
    n: int
    k: int
    piece_bytes: int
    ms: float
    serial_ms: float
    schedule: Schedule

    @classmethod
    def measured(
        cls, problem: Problem, regime: str, ms: float, serial_ms: float, schedule: Schedule
    ) -> Point:
        """Return the point of a measured problem; times are rounded to five digits.

        Args:
            problem: the measured problem.
            regime: how calls were made.
            ms: median ms of a call with `schedule`.
            serial_ms: median ms of a call with serial.
            schedule: the best schedule, resolved.
        """
        facts = facts_of(problem)
        ms, serial_ms = (float(f"{value:.5g}") for value in (ms, serial_ms))
        return cls(
            problem.op, problem.dtype, regime, problem.world, facts.m, facts.n, facts.k,
            facts.piece_bytes, ms, serial_ms, schedule,
        )  # fmt: skip

    def distance(self, facts: Facts) -> float:
        """Return the largest ratio of sizes; infinite if operator, dtype or ranks differ."""
        if (self.op, self.dtype, self.ranks) != (facts.op, facts.dtype, facts.world):
            return math.inf
        pairs = (
            (self.m, facts.m), (self.n, facts.n), (self.k, facts.k),
            (self.piece_bytes, facts.piece_bytes),
        )  # fmt: skip
        return max(max(a, b) / max(min(a, b), 1) for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Book:
    """Measured points of one machine.

    Attributes:
        name: its name in messages.
        machine, ficco, driver, date: where, with which versions, and when it was measured.
        points: the measured points.
        kernels: KERNELS of the version that measured it.
        signals: the kind of signals at peers, "write" or "copy".
    """

    name: str
    machine: str
    ficco: str
    driver: str
    date: str
    points: tuple[Point, ...]
    kernels: int = 1
    signals: str = "write"

    @classmethod
    def named(cls, name: str) -> Book:
        """Read a shipped book, or a file if the name ends in .toml.

        Raises:
            InputError: there is no such book, or the file is not a book.
        """
        return cls.from_toml(data.load("tuned", name, "tuning table", InputError), name)

    @classmethod
    def from_toml(cls, table: Mapping[str, Any], name: str) -> Book:
        """Build a book from a parsed file; `name` is used in messages.

        Raises:
            InputError: a field is missing, unknown or wrong.
        """
        heads = ("machine", "ficco", "driver", "date")
        needed = (*heads, "points")
        whole = f"tuning table {name!r}"
        reading.check_known(table, (*needed, "kernels", "signals"), whole, needed)
        points = []
        if not isinstance(table["points"], list):
            raise InputError(
                f"{whole}: points={shown(table['points'])}: a list of tables, [[points]], is needed"
            )
        for number, entry in enumerate(table["points"]):
            where = f"{whole}, points[{number}]"
            fields = (*NAMED_FIELDS, *SIZES, "ms", "serial_ms", "schedule")
            reading.check_known(entry, fields, where, fields)
            sizes = [reading.whole(entry[size], f"{where}: {size}") for size in SIZES]
            times = [
                reading.number(entry[time], f"{where}: {time}") for time in ("ms", "serial_ms")
            ]
            # piece_bytes is 0 for one rank, or for ranks without rows.
            for field in (*SIZES, "ms", "serial_ms"):
                if entry[field] < 0 or (entry[field] == 0 and field != "piece_bytes"):
                    least = "0 or more" if field == "piece_bytes" else "a number above 0"
                    raise InputError(f"{where}: {field}={shown(entry[field])}: {least} is needed")
            if not isinstance(entry["schedule"], Mapping):
                found = shown(entry["schedule"])
                raise InputError(f"{where}: schedule={found}: a table of axes is needed")
            try:
                schedule = Schedule.from_json(entry["schedule"])
            except InputError as wrong:
                raise InputError(f"{where}, schedule: {wrong}") from None
            for axis in ("grain", "route", "order", "transport"):
                if (value := getattr(schedule, axis)) in ("world", "machine"):
                    raise InputError(
                        f"{where}: schedule.{axis}={value!r}: the measured value is needed, not "
                        "'world' or 'machine'"
                    )
            for word, values in (("op", registry.names()), ("dtype", DTYPES), ("regime", REGIMES)):
                if not isinstance(entry[word], str) or entry[word] not in values:
                    near = closest(entry[word], values)
                    raise InputError(
                        f"{where}: {word}={shown(entry[word])}{near}; it is one of "
                        f"{', '.join(values)}"
                    )
            op, dtype, regime = (str(entry[word]) for word in NAMED_FIELDS)
            ranks, m, n, k, piece = sizes
            points.append(
                Point(op, dtype, regime, ranks, m, n, k, piece, times[0], times[1], schedule)
            )
        for head in heads:
            if not isinstance(table[head], datetime.date):
                reading.printable(table[head], f"{whole}: {head}")
        machine, ficco, driver, date = (str(table[head]) for head in heads)
        first: dict[tuple[object, ...], Point] = {}
        for p in points:  # a shape that is there again is dropped
            first.setdefault((p.op, p.dtype, p.regime, p.ranks, p.m, p.n, p.k, p.piece_bytes), p)
        kernels = reading.whole(table.get("kernels", 1), f"{whole}: kernels")
        signals = table.get("signals", "write")
        if signals not in ("write", "copy"):
            raise InputError(f"{whole}: signals={shown(signals)}: 'write' or 'copy' is needed")
        return cls(name, machine, ficco, driver, date, tuple(first.values()), kernels, signals)

    def to_toml(self, comment: str) -> str:
        """Return the book as a TOML text for `from_toml`; `comment` is its first line."""
        head = [f"# {comment}"] + [
            f"{name} = {_toml(getattr(self, name))}"
            for name in ("machine", "ficco", "driver", "date", "kernels", "signals")
        ]
        blocks = ["\n".join(head), *map(_block, self.points)]
        return "\n\n".join(blocks) + "\n"

    def unfit(self, machine: Machine, driver: str | None = None) -> str:
        """Return the reason why the book must not be used, or "".

        Args:
            machine: the profile to predict for.
            driver: driver version of the GPUs; None: unknown.
        """
        if self.machine != machine.name:
            return f"it is of machine {self.machine!r}, not of {machine.name!r}"
        if self.kernels != KERNELS:
            return f"it was measured with kernels {self.kernels}, this ficco has {KERNELS}"
        if machine.engine == "cuda" and self.signals != machine.signals:
            return (
                f"it was measured with signals={self.signals!r}, here they are {machine.signals!r}"
            )
        if driver is not None and self.driver.partition(".")[0] != driver.partition(".")[0]:
            return f"it was measured with driver {self.driver}, this is {driver}"
        return ""

    def caution(self, driver: str | None) -> str:
        """Return how the driver differs from the book's, if the book still fits, or ""."""
        if driver is None or driver == self.driver:
            return ""
        return f"it was measured with driver {self.driver}, this is {driver}; times may differ"

    def nearest(self, facts: Facts, regime: str) -> Point | None:
        """Return the nearest point in the neighbourhood, or None."""
        near = [p for p in self.points if p.regime == regime and p.distance(facts) <= NEAR]
        return min(near, key=lambda point: point.distance(facts), default=None)


def known(machine: str) -> list[Book]:
    """Return the books to choose by: FICCO_BOOK's (equal on all ranks), then the shipped one.

    Raises:
        InputError: FICCO_BOOK does not name a book.
    """
    name, own = environment_book(), shipped(machine)
    return ([_named(name)] if name else []) + ([own] if own else [])


def environment_book() -> str:
    """Return the value of FICCO_BOOK: the name of a shipped book, a .toml file, or "".

    Raises:
        InputError: it does not name a book.
    """
    name = os.environ.get("FICCO_BOOK", "")
    if name:
        try:
            _named(name)
        except InputError as error:
            raise InputError(f"FICCO_BOOK: {error}") from None
    return name


@lru_cache(maxsize=16)
def _named(name: str) -> Book:
    return Book.named(name)


@lru_cache(maxsize=16)
def shipped(machine: str) -> Book | None:
    """Return the shipped book of a machine, by the machine's name, or None."""
    return Book.named(machine) if machine in data.names("tuned") else None


def _block(point: Point) -> str:
    axes = point.schedule.to_json().items()
    lines = ["[[points]]"]
    lines += [f"{name} = {_toml(getattr(point, name))}" for name in (*NAMED_FIELDS, *SIZES)]
    lines += [f"{name} = {getattr(point, name):.5g}" for name in ("ms", "serial_ms")]
    lines.append(f"schedule = {{ {', '.join(f'{axis} = {_toml(v)}' for axis, v in axes)} }}")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
