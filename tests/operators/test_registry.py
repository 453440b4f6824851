"""Operators are records: a new one is one file, and few other files name those that there are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks_of_torch import run
from shift_matmul import NAME, OPERATOR

import ficco
from ficco import operators
from ficco.cli.main import main
from ficco.core.errors import InputError, ScheduleError
from ficco.core.machine import Machine
from ficco.lowering import lower
from ficco.measure import simulator
from ficco.operators import OPERATORS, oracle, registry
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.verifier import verify

PACKAGE = Path(ficco.__file__).parent


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    operators.register(replace(OPERATOR, function=None))  # torch forgets no custom operator
    yield
    del registry._operators[NAME]


def points(problem: Problem, machine: Machine) -> list[Schedule]:
    return [
        replace(Schedule.named(name), grain=grain).resolve(problem.world, machine)
        for name in Schedule.names(problem.op)
        for grain in (1, 3)
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_schedule_is_proved_and_gives_what_the_oracle_says(world: int) -> None:
    rows = tuple((7 * rank + 5) % 11 for rank in range(world))
    problem = Problem.chunked(NAME, world, sum(rows), 6, 9, rows=rows)
    given = oracle.inputs(problem, 1)
    exact = oracle.results(problem, given)
    with ficco.Node(world) as node:
        for schedule in points(problem, node.machine):
            assert not verify(lower(problem, schedule)), schedule
            ys = node.run(problem, given, schedule=schedule)
            for rank in range(world):
                assert oracle.judge(ys[rank][0], exact[rank][0], "float32").ok, (schedule, rank)


def test_a_node_calls_it_by_name() -> None:
    xs = [np.full((2, 3), rank, np.float32) for rank in range(3)]
    ws = [np.eye(3, dtype=np.float32)] * 3
    with ficco.Node(3) as node:
        ys = node.call(NAME, xs=xs, ws=ws, schedule="hetero_fused_1d")
        assert [y[0, 0] for y in ys] == [2, 0, 1]
        with pytest.raises(InputError, match=r"has no argument 'wz' .did you mean 'ws'"):
            node.call(NAME, xs=xs, wz=ws)
        with pytest.raises(InputError, match="ws: NoneType found; give a list with one array"):
            node.call(NAME, xs=xs)
        with pytest.raises(InputError, match="unknown operator 'shift'"):
            node.call("shift", xs=xs, ws=ws)


@pytest.mark.parametrize("name", ["h200x4", "mesh4"])
def test_the_simulator_predicts_it(name: str) -> None:
    machine = Machine.named(name)
    problem = Problem.chunked(NAME, 4, 4096, 512, 1024, "float32")
    for schedule in points(problem, machine):
        try:
            timeline = simulator.predict(problem, schedule, machine)
        except ScheduleError:
            assert schedule.transport == "sm"
            continue
        assert timeline.duration_us > 0


def test_commands_know_it(capsys: Any, tmp_path: Path) -> None:
    assert main(["run", NAME, "--ranks", "3", "--m", "9", "--n", "4", "--k", "5",
                 "--machine", "host", "--schedule", "all"]) == 0  # fmt: skip
    assert NAME in capsys.readouterr().out
    assert main(["plan", NAME, "--ranks", "2", "--schedule", "gated_1d", "--json"]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    assert main(["plan", "--check", str(tmp_path / "plan.json")]) == 0


@pytest.mark.parametrize("world", [1, 2, 3])
def test_it_is_a_custom_operator_of_torch(world: int, tmp_path: Path, torch: Any) -> None:
    worker = str(Path(__file__).with_name("shift_worker.py"))
    run(worker, world, tmp_path)


def test_a_name_is_taken_once() -> None:
    with pytest.raises(InputError, match="'shift_matmul' is registered already"):
        operators.register(OPERATOR)
    with pytest.raises(InputError, match="the name is an identifier"):
        operators.register(replace(OPERATOR, name="my sum", function=None))


# Files that may name operators: the public functions with their signatures, kernels that are one
# operator's own, what measures one operator, and layers, each of which calls its function.
NAMING = {
    "__init__.py", "api/node_operators.py", "api/functions.py", "api/autograd.py",
    "api/experts.py",
    "api/explaining.py", "api/layer_timing.py", "api/sizing.py", "api/layers/choosing.py",
    "api/layers/layer.py",
    "cli/packing/grid.py", "measure/profiling/entry_costs.py",
    "measure/profiling/gpu/calls.py", "measure/profiling/host/rig.py", "cli/arguments.py",
}  # fmt: skip


def _texts(path: Path) -> set[object]:
    """Return the constants in a file; a docstring is one, so names in its examples do not count."""
    tree = ast.parse(path.read_text())
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def test_no_other_file_names_an_operator() -> None:
    named = {*OPERATORS, "column_matmul", "exchange_rows"}
    files = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "operators" and named & _texts(path)
    }
    assert files == NAMING
