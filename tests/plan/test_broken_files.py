"""Every field of every kind of file with every wrong value: it loads, or one error names it."""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ficco import Problem, Schedule
from ficco.cli.sweeping.grid import Grid
from ficco.core import data
from ficco.core.errors import InputError
from ficco.core.machine import Machine
from ficco.lowering import lower
from ficco.measure.selector.book import Book
from ficco.plan.plan_json import dumps, loads

WRONG = (
    "no", "x" * 5000, -1, 0, 1.5, float("nan"), float("inf"), True, 10**400, 1 << 20_000, [], {},
    [[1, "a"]], [1] * 5000, datetime.date(2026, 11, 21),
)  # fmt: skip
CASE = {
    "op": ["all_gather_matmul"], "shapes": [[8, 8, 8]], "m_each": True, "dtypes": ["float32"],
    "regimes": ["captured"], "schedules": ["auto", {"name": "ring_1d"}], "grains": [1, "world"],
}  # fmt: skip
GRID = {"how": "simulated", "machine": "mesh4", "ranks": 4, "assumptions": ["x"], "cases": [CASE]}


def shipped(kind: str, name: str) -> Any:
    return copy.deepcopy(data.load(kind, name, kind, InputError))


def book() -> Any:
    table = shipped("tuned", data.names("tuned")[0])
    return table | {"points": table["points"][:1]}


def plan() -> Any:
    problem = Problem.chunked("all_to_all_matmul", 2, 4, 2, 2)
    schedule = Schedule.named("hetero_fused_1d").resolve(2, Machine.named("mesh4"))
    table = json.loads(dumps(lower(problem, schedule)))
    table["ranks"][0]["steps"] = table["ranks"][0]["steps"][:2]
    return table | {"ranks": table["ranks"][:1]}


def read_plan(table: Any, name: str) -> object:
    return loads(json.dumps(table, default=str), name)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value; of lists, of the first and the last entry."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        for at in sorted({0, len(value) - 1}):
            yield from places(value[at], (*path, at))


def changed(table: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    if not path:
        return wrong
    changed_table = copy.deepcopy(table)
    at = changed_table
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = wrong
    return changed_table


@pytest.mark.parametrize(
    ("read", "make"),
    [
        (Machine.from_toml, lambda: shipped("machines", "mesh4")),
        (Book.from_toml, book),
        (Grid.from_toml, lambda: GRID),
        (Schedule.from_toml, lambda: shipped("named", "hetero_fused_1d")),
        (read_plan, plan),
    ],
    ids=["machine", "book", "grid", "schedule", "plan"],
)
def test_wrong_values(read: Callable[[Any, str], object], make: Callable[[], Any]) -> None:
    right = make()
    read(right, "the file")
    refused = 0
    for path in places(right):
        for wrong in WRONG:
            if read is read_plan and isinstance(wrong, int) and wrong.bit_length() > 10_000:
                continue  # JSON cannot hold it
            try:
                read(changed(right, path, wrong), "the file")
            except InputError as error:
                words = str(error)
                refused += 1
                field = [key for key in path if isinstance(key, str)][-2:]
                assert "the file" in words and len(words) < 600, (path, words)
                assert not field or any(key in words for key in [*field, "digest"]), (path, words)
    assert refused > 50
