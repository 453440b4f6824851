"""`ficco list`, and the errors that point to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from calling import call

from ficco.core import data
from ficco.operators import OPERATORS

NAMES = {
    "operators": OPERATORS,
    "machines": data.names("machines"),
    "schedules": data.names("named"),
    "grids": data.names("sweeps"),
}


@pytest.mark.parametrize("kind", NAMES)
def test_each_name_has_a_line_with_a_description(capsys: Any, kind: str) -> None:
    code, out, err = call(capsys, "list", kind, "--json")
    entries = json.loads(out)
    assert code == 0 and err == ""
    assert [entry["name"] for entry in entries] == list(NAMES[kind])
    assert len({entry["about"] for entry in entries}) == len(entries)  # each says what it alone is
    assert all(entry["about"] and "\n" not in entry["about"] for entry in entries)
    code, out, _ = call(capsys, "list", kind)
    words = " ".join(out.split())
    assert code == 0 and all(f"{e['name']} {e['about']}" in words for e in entries)


def test_schedules_of_some_operators_name_these(capsys: Any) -> None:
    out = call(capsys, "list", "schedules", "--json")[1]
    about = {entry["name"]: entry["about"] for entry in json.loads(out)}
    assert about["gather_sm"].endswith("(only all_gather_matmul)")
    assert "(only" not in about["serial"]


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        (["run", "--schedule", "fast"], "schedules"),
        (["run", "--machine", "fast"], "machines"),
        (["run", "fast"], "operators"),
        (["sweep", "fast", "--out", "x"], "grids"),
    ],
)
def test_errors_about_unknown_names_point_to_it(capsys: Any, args: list[str], kind: str) -> None:
    code, _, err = call(capsys, *args)
    assert code == 2 and f"`ficco list {kind}`" in err
    assert call(capsys, "list", kind)[0] == 0


def test_without_a_kind_everything_is_listed(capsys: Any) -> None:
    code, out, err = call(capsys, "list", "--json")
    assert code == 0 and err == ""
    listed = json.loads(out)
    assert {kind: [entry["name"] for entry in listed[kind]] for kind in listed} == {
        kind: list(names) for kind, names in NAMES.items()
    }
    code, out, _ = call(capsys, "list")
    assert code == 0
    parts = out.rstrip().split("\n\n")
    assert [part.split()[0] for part in parts] == ["operators,", "profiles", "named", "grids"]
    for part, entries in zip(parts, listed.values(), strict=True):
        heading, *lines = part.splitlines()
        assert heading.endswith(":") and not heading.startswith(" ")
        assert [line.split()[0] for line in lines] == [entry["name"] for entry in entries]


def test_a_wrong_kind_is_answered_with_the_kinds(capsys: Any) -> None:
    code, out, err = call(capsys, "list", "engines")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "'engines'" in err and all(kind in err for kind in NAMES)
