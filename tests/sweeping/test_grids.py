"""What grids say, what they stand for, and how they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ficco.cli.sweeping.grid import Grid
from ficco.cli.sweeping.points import Case, digest_of, expanded
from ficco.core import data
from ficco.core.errors import InputError
from ficco.core.machine import Machine
from ficco.measure.selector import Choice, quick
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

CASE: dict[str, Any] = {"op": "all_gather_matmul", "shapes": [[64, 32, 48]]}


def cases(machine: str, world: int, simulated: bool = False, **fields: Any) -> tuple[Case, ...]:
    profile = Machine.named(machine)

    def choose(problem: Problem, regime: str) -> Choice:
        return quick(problem, profile, regime)

    grid = Grid.from_toml({"cases": [{**CASE, **fields}]}, "g")
    return expanded(grid, profile, world, simulated, choose)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "the field 'cases' is missing"),
        ({"cases": []}, "at least one"),
        ({"cases": [CASE], "round": 3}, "unknown field 'round' (did you mean 'rounds'?)"),
        ({"cases": [CASE], "rounds": 0}, "rounds=0; it must be a whole number from 1"),
        ({"cases": [CASE], "rounds": True}, "rounds=True"),
        ({"cases": [CASE], "how": "guessed"}, "how='guessed'"),
        ({"cases": [CASE], "how": "simulated"}, "machine is missing"),
        ({"cases": [CASE], "machine": "mesh5"}, "unknown machine 'mesh5'"),
        ({"cases": [CASE], "ranks": 99}, "ranks=99"),
        ({"cases": [CASE], "assumptions": "one"}, "assumptions='one'; it must be a list"),
        ({"cases": [{**CASE, "shape": 1}]}, "unknown field 'shape' (did you mean 'shapes'?)"),
        ({"cases": [{"op": "all_gather_matmul"}]}, "the field 'shapes' is missing"),
        ({"cases": [{**CASE, "op": "allgather_matmul"}]}, "did you mean 'all_gather_matmul'"),
        ({"cases": [{**CASE, "shapes": [[1, 2]]}]}, "[1, 2] found; each must be [m, n, k]"),
        (
            {"cases": [{**CASE, "shapes": [[1, 2, 0]]}]},
            "each must be [m, n, k], whole numbers from 1 to 2147483647",
        ),
        ({"cases": [{**CASE, "dtypes": ["bf16"]}]}, "did you mean 'bfloat16'"),
        ({"cases": [{**CASE, "regimes": ["eagerly"]}]}, "did you mean 'eager'"),
        ({"cases": [{**CASE, "schedules": ["gated_2d"]}]}, "did you mean 'gated_1d'"),
        ({"cases": [{**CASE, "schedules": [{"name": "serial", "rout": "x"}]}]}, "unknown axis"),
        (
            {"cases": [{**CASE, "schedules": [{"pace": "free"}]}]},
            "a table needs the name of a schedule",
        ),
        ({"cases": [{**CASE, "grains": [0]}]}, "grains[0]=0"),
        ({"cases": [{**CASE, "grains": ["all"]}]}, "or 'world'"),
        ({"cases": [{**CASE, "m_each": 1}]}, "m_each=1; it must be true or false"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(table: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        Grid.from_toml(table, "g")
    assert said in str(refused.value) and "'g'" in str(refused.value)


@pytest.mark.parametrize("name", data.names("sweeps"))
def test_shipped_grids_can_run_on_what_they_are_for(name: str) -> None:
    grid = Grid.named(name)
    machine = Machine.named(grid.machine)
    worlds = [grid.ranks] if grid.ranks else [2, 4, 8]
    for world in worlds:
        profile = machine if machine.rated else Machine.named(f"h200x{world}")
        found = expanded(
            grid, machine, world, grid.how == "simulated",
            lambda problem, regime, profile=profile: quick(problem, profile, regime),
        )  # fmt: skip
        points = [point for case in found for point in case.points]
        assert len({point.id for point in points}) == len(points)
        assert {point.reason for point in points} == {""}
        assert all(case.of(regime)[0].name == "serial" for case in found for regime in case.regimes)


def test_the_laptop_grid_has_some_fifty_points() -> None:
    found = expanded(
        Grid.named("laptop"), Machine.named("mesh4"), 4, False,
        lambda problem, regime: quick(problem, Machine.named("mesh4"), regime),
    )  # fmt: skip
    assert 40 <= sum(len(case.points) for case in found) <= 60


def test_grains_are_for_schedules_that_leave_them_open() -> None:
    (case,) = cases("mesh4", 4, grains=[1, 3], schedules=["shard_p2p", "hetero_fused_1d"])
    found = [(point.name, point.grain) for point in case.points]
    assert found == [
        ("serial", 1), ("shard_p2p", 1), ("hetero_fused_1d", 1), ("hetero_fused_1d", 3),
    ]  # fmt: skip


def test_points_that_come_to_the_same_axes_stand_once() -> None:
    (case,) = cases("mesh4", 4, grains=[4, "world"], schedules=["hetero_fused_1d"])
    assert [point.name for point in case.points] == ["serial", "hetero_fused_1d"]


@pytest.mark.parametrize("op", ["matmul_all_reduce", "all_gather_matmul"])
def test_few_rows_have_points_of_their_own(op: str) -> None:
    (few,) = cases("h200x4", 4, True, op=op, shapes=[[8, 4096, 4096]])
    (many,) = cases("h200x4", 4, True, op=op, shapes=[[4096, 4096, 4096]])
    named = [Schedule.named(name) for name in Schedule.names(op)]
    own = {schedule.name for schedule in named if schedule.for_few_rows}
    assert own and own <= {point.name for point in few.points}
    assert not own & {point.name for point in many.points}
    pulling = {schedule.name for schedule in named if schedule.moves}
    assert len(pulling) == (2 if op == "matmul_all_reduce" else 1)
    assert pulling <= {point.name for point in many.points if not point.reason}


def test_rows_of_each_rank_and_shapes_named_twice() -> None:
    (case,) = cases("mesh4", 4, m_each=True, shapes=[[16, 32, 48], [16, 32, 48]])
    assert (case.shape.m, case.shape.n) == (64, 32)


def test_an_impossible_point_says_why_and_others_stay() -> None:
    (case,) = cases("mesh4", 4, op="embedding_all_to_all", grains=[2])
    reasons = {point.name: point.reason for point in case.points}
    assert reasons.get("uniform_fused_2d")
    assert not reasons["hetero_fused_1d"] and not reasons["serial"]
    (case,) = cases("mesh4", 4, regimes=["captured", "synchronized"])
    assert all("synchronized, not captured" in point.reason for point in case.of("captured"))
    assert len(case.able) == len(case.of("synchronized"))


def test_auto_is_a_point_beside_the_schedule_that_it_takes() -> None:
    (case,) = cases("mesh4", 4, schedules=["auto", "hetero_fused_1d"], shapes=[[512, 128, 512]])
    auto = next(point for point in case.points if point.name == "auto")
    assert auto.chosen and auto.chosen["by"] == "rule"
    assert auto.schedule and auto.schedule.name == auto.chosen["schedule"]


def test_the_digest_follows_points_and_rounds() -> None:
    one = cases("mesh4", 4, schedules=["hetero_fused_1d"])
    grid = Grid.from_toml({"cases": [CASE]}, "g")
    same = Grid.from_toml({"cases": [CASE], "about": "another text"}, "h")
    more = Grid.from_toml({"cases": [CASE], "rounds": 21}, "g")
    assert digest_of(grid, one) == digest_of(same, one) != digest_of(more, one)
    assert digest_of(grid, one) != digest_of(grid, cases("mesh4", 4))


FILE = """
about = "shapes = [[2147483648, 1, 1]]"

[[cases]]
op = "all_gather_matmul"
shapes = [[64, 32, 48]]

[[cases]] # more
op = "all_gather_matmul"
shapes = [
    [64, 32, 48],
    [8, 8, {size}],
]
"""


@pytest.mark.parametrize(
    ("size", "line"),
    [
        ("2147483648", 12), ("2_147_483_648", 12), ("-1", 12), ("0", 12),
        ("0x80000000", 8), ("8.0", 8), ("true", 8), ("nan", 8), ('"8"', 8),
    ],
)  # fmt: skip
def test_a_size_that_cannot_be_is_refused_with_its_line(
    tmp_path: Path, size: str, line: int
) -> None:
    file = tmp_path / "large.toml"
    file.write_text(FILE.replace("{size}", size))
    with pytest.raises(
        InputError, match=rf"large\.toml', cases\[1\], line {line}: shapes\[[01]\]: .*2147483647"
    ):
        Grid.named(str(file))
    file.write_text(FILE.replace("{size}", "2147483647"))
    assert Grid.named(str(file)).cases[1].shapes[1] == (8, 8, 2147483647)
