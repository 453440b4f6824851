"""`ficco run` lowers each rank's plan of a schedule once in a process."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from calling import call
from cases import ROUTED
from counting import Lowerings, count_lowerings

from ficco.cli import engine_choice
from ficco.operators import OPERATORS
from ficco.plan.schedule import Schedule

SMALL = ["--m", "67", "--n", "29", "--k", "31", "--iters", "2", "--ranks", "3", "--json"]


@pytest.fixture
def lowerings(monkeypatch: Any) -> Lowerings:
    """Count this process's lowerings; its commands see no GPU."""
    monkeypatch.setattr(engine_choice, "gpus", lambda *asked: engine_choice.Gpus(0, "no driver"))
    return count_lowerings(monkeypatch.setattr)


@pytest.mark.parametrize(
    "args",
    [
        ["--machine", "host"],
        ["--machine", "host", "--schedule", "gated_1d,hetero_fused_1d,gated_1d"],
        ["--machine", "mesh4", "--simulate"],
        ["--machine", "h100x4", "--simulate"],
    ],
    ids=["run all", "run three", "simulate", "simulate GPUs"],
)
@pytest.mark.parametrize("op", OPERATORS)
def test_each_plan_is_lowered_once(
    capsys: Any, lowerings: Lowerings, op: str, args: list[str]
) -> None:
    if op in ROUTED:
        own = Schedule.names(op)[-1]
        args = [arg.replace("gated_1d", own).replace("hetero_fused_1d", "serial") for arg in args]
    code, out, err = call(capsys, "run", op, *SMALL, *args)
    assert code == 0, err
    rows = json.loads(out)["results"]
    names = {schedule.name for _, schedule, _ in lowerings}
    assert names | {"serial"} >= {row["schedule"] for row in rows}
    assert set(lowerings.values()) == {1}
    ranks = Counter((problem, schedule) for problem, schedule, _ in lowerings)
    assert set(ranks.values()) <= {1, 3}  # 1: rank 0 of a schedule that is left out


def test_a_plan_from_a_file_is_not_lowered(
    capsys: Any, lowerings: Lowerings, tmp_path: Any
) -> None:
    sizes = [word for word in SMALL if word not in ("--iters", "2")]
    code, out, err = call(capsys, "plan", *sizes, "--schedule", "gated_1d")
    assert code == 0, err
    assert set(lowerings.values()) == {1} and len(lowerings) == 3
    file = tmp_path / "plan.json"
    file.write_text(out)
    lowerings.clear()
    code, out, err = call(capsys, "run", "--plan", str(file), "--iters", "2")
    assert code == 0, err
    assert {schedule.name for _, schedule, _ in lowerings} == {"serial"}
    assert set(lowerings.values()) == {1} and len(lowerings) == 3
