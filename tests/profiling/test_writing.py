"""Profiles as text: what is written reads back as it was, and nothing else is written."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficco.core.errors import InputError, MachineError
from ficco.core.machine import COLLECTIVES, Machine
from ficco.measure.profiling.figures import rounded
from ficco.measure.profiling.writing import check_target, profile_text, source_line, write_profile

positive = st.floats(1e-3, 1e7)
sizes = st.lists(st.integers(1, 1 << 40), min_size=1, max_size=40, unique=True).map(sorted)


def some_of(names: tuple[str, ...]) -> st.SearchStrategy[set[str]]:
    return st.sets(st.sampled_from(names))


@st.composite
def curves(draw: st.DrawFn) -> list[tuple[int, float]]:
    return [(size, draw(positive)) for size in draw(sizes)]


@st.composite
def profiles(draw: st.DrawFn) -> dict[str, Any]:
    """Return the fields of a profile as a measurement gives them."""
    text = st.text(st.characters(exclude_categories=("C", "Zl", "Zp", "Zs")), max_size=30)
    link = {
        "scope": "node", "per": draw(st.sampled_from(("pair", "port"))),
        "latency_us": draw(st.floats(0, 100)), "gbps": draw(curves()),
    }  # fmt: skip
    for name in draw(some_of(("out_gbps", "in_gbps", "row_gbps"))):
        link[name] = draw(curves())
    shape = st.tuples(*[st.integers(1, 1 << 17)] * 3)
    gemms = [(*draw(shape), draw(positive)) for _ in range(draw(st.integers(1, 60)))]
    return {
        "name": draw(text), "about": draw(text), "engine": draw(st.sampled_from(("host", "cuda"))),
        "devices": draw(st.integers(1, 64)), "device": draw(text), "source": draw(text),
        "units": draw(st.integers(1, 500)), "paced": draw(st.booleans()),
        "memory_gbps": draw(positive), "links": [link],
        "costs": {"signal_us": draw(st.floats(0, 9)), "gemm_beside_copies": draw(st.floats(1, 3))},
        "gemms": {"bfloat16": gemms},
        "collectives": {name: draw(curves()) for name in draw(some_of(COLLECTIVES))},
        "pieces": [
            {"cut": "rows", "m": 4, "n": 4, "k": 4, "ratio": draw(curves())}
            for _ in range(draw(st.integers(0, 2)))
        ],
    }  # fmt: skip


@given(profiles())
def test_what_is_written_reads_back(table: dict[str, Any]) -> None:
    figures = rounded(table)
    text = profile_text(figures)
    parsed = tomllib.loads(text)
    assert parsed == figures
    machine = Machine.from_toml(parsed, "written")
    assert machine == Machine.from_toml(figures, "given")
    assert machine.rated and machine.paced == (table["paced"] and table["engine"] == "host")
    plain = [line for line in text.splitlines() if '"' not in line]
    assert all(len(line) <= 100 for line in plain)


def small() -> dict[str, Any]:
    link = {"scope": "node", "per": "port", "latency_us": 1.23456, "gbps": [(4096, 123.456)]}
    return {
        "name": "small", "engine": "host", "devices": 2, "units": 1, "paced": False,
        "links": [link], "gemms": {"float32": [(8, 8, 8, 1.0)]},
    }  # fmt: skip


def test_points_stand_several_a_line() -> None:
    table = small()
    table["gemms"] = {"float32": [(128 * i, 512, 1024, 1.5 * i) for i in range(1, 101)]}
    lines = profile_text(rounded(table)).splitlines()
    points = [line for line in lines if line.startswith("  [")]
    assert len(points) < 40 and all(len(line) <= 100 for line in lines)
    assert "latency_us = 1.235" in lines and "paced = false" in lines


def test_a_file_is_made_whole(tmp_path: Path) -> None:
    target = check_target(str(tmp_path / "small.toml"))
    machine = write_profile(target, small())
    assert os.listdir(tmp_path) == ["small.toml"]
    assert Machine.named(str(target)) == machine and machine.rated and not machine.paced
    assert machine.link.latency_us == 1.235 and machine.link.gbps == ((4096, 123.5),)


def test_what_is_no_profile_is_not_written(tmp_path: Path) -> None:
    for wrong in ({"speed": 3}, {"units": 0}, {"costs": {"launch_us": float("inf")}}):
        with pytest.raises(MachineError):
            write_profile(tmp_path / "wrong.toml", small() | wrong)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_went_meanwhile_is_told(tmp_path: Path) -> None:
    target = check_target(str(tmp_path / "small.toml"))
    tmp_path.rmdir()
    with pytest.raises(InputError, match="No such file"):
        write_profile(target, small())


def test_targets_that_cannot_be(tmp_path: Path) -> None:
    there = tmp_path / "there.toml"
    there.write_text("")
    (tmp_path / "dangling.toml").symlink_to(tmp_path / "nowhere")
    for path, message in (
        ("there.toml", "the file exists"),
        ("dangling.toml", "the file exists"),
        ("machine.json", "ends in .toml"),
        (".toml", "ends in .toml"),
        ("none/machine.toml", "No such file or directory"),
        ("there.toml/machine.toml", "Not a directory"),
    ):
        with pytest.raises(InputError, match=message):
            check_target(str(tmp_path / path))
    assert sorted(os.listdir(tmp_path)) == ["dangling.toml", "there.toml"]


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    """One that is a file: permissions do not keep root out."""
    folder = tmp_path / "folder"
    folder.touch()
    with pytest.raises(InputError, match="Not a directory"):
        check_target(str(folder / "machine.toml"))


def test_the_source_has_date_and_versions() -> None:
    found = source_line({"torch": "2.11", "CUDA": "13.0"})
    assert found.startswith("measured 20") and " by ficco doctor --profile: torch 2.11, " in found
    assert ", ficco " in found
