"""Predictions of gated launches: their tiles, parts that arrive, and what was measured."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ficco.core.dtypes import ELEMENT_BYTES
from ficco.core.machine import Machine
from ficco.measure import selector
from ficco.measure.layout import Layout
from ficco.measure.selector.facts import facts_of
from ficco.measure.selector.rule import estimate_us
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.program.tiling import TILES, choose_tile, work_of

RESULTS = Path(__file__).parents[2] / "bench/results"
UNITS, ITEM = 132, ELEMENT_BYTES["bfloat16"]


def work(rows: list[int], n: int, k: int) -> tuple[float, float]:
    """Return the work of a launch of bfloat16 on an H100."""
    return work_of(rows, [n] * len(rows), ITEM, UNITS, k)


def test_a_last_part_takes_a_round_of_its_tiles() -> None:
    """Of few tiles, each has a multiprocessor: the last part takes as long as all parts do."""
    whole, last = work([993, 993], 896, 16128)
    assert last > 0.9 * whole
    whole, last = work([4096, 4096], 4096, 4096)
    assert 0.4 * whole < last < 0.6 * whole


def test_tiles_of_a_launch_are_split_together() -> None:
    """Two parts with 56 tiles each leave no multiprocessor for a second program on a tile."""
    both, _ = work([993, 993], 896, 16128)
    alone, _ = work([993], 896, 16128)
    assert alone < 0.75 * both


def test_the_last_part_takes_no_longer_than_all() -> None:
    """Of 500 launches of uneven parts, some of them empty."""
    draw = random.Random(1)
    for _ in range(500):
        rows = [draw.choice([0, 1, 17, draw.randint(1, 5000)]) for _ in range(draw.randint(1, 8))]
        n, k = draw.randint(1, 5000), draw.choice([1, 64, 4097, 16384])
        whole, last = work(rows, n, k)
        assert 0 < last <= whole or not any(rows), (rows, n, k)


@pytest.mark.parametrize("rows", [(4331, 17), (17, 4331), (64, 4224), (0, 4096), (2000, 2000)])
def test_uneven_shards_are_simulated(rows: tuple[int, int]) -> None:
    """A launch takes as long by the simulator as its parts, none of which is negative."""
    machine = Machine.named("h100x2")
    m = sum(rows)
    problem = Problem.chunked("all_gather_matmul", 2, m, 2048, 8192, "bfloat16", rows=rows)
    choice = selector.choose(problem, machine, "captured", by="simulator")
    gated = [ms for schedule, ms in choice.alternatives if schedule.compute == "gated"]
    schedule = Schedule.named("gated_1d").resolve(2, machine)
    by_rule = estimate_us(facts_of(problem), machine, schedule, "captured") / 1e3
    assert all(0.5 * by_rule < ms < 4 * by_rule for ms in gated) and gated


def test_each_part_reads_the_weight() -> None:
    """Parts of few rows take longer the more there are, if the weight is large."""
    few, many = (work([4] * parts, 16640, 9856)[0] for parts in (2, 8))
    assert many > 1.5 * few


@pytest.mark.parametrize(
    ("rows", "n", "k", "tile"),
    [
        ([72, 72], 320, 24960, (64, 64)),
        ([111, 111], 960, 17920, (64, 128)),
        ([256, 256], 1280, 8192, (128, 128)),
        ([179] * 4, 640, 23168, (128, 128)),
        ([64] * 8, 1280, 8192, (64, 256)),
        ([512, 512], 4096, 2048, (128, 256)),
        ([568] * 4, 2240, 6400, (128, 256)),
        ([2560] * 4, 3584, 8192, (128, 256)),
        ([14] * 4, 16640, 9856, (64, 256)),
    ],
)
def test_the_tile_that_was_fastest_is_chosen(
    rows: list[int], n: int, k: int, tile: tuple[int, int]
) -> None:
    """Of all tiles, on an H100 (bench/NOTES.md)."""
    found = choose_tile(rows, [n] * len(rows), ITEM, UNITS, True, (), k)
    assert found[:2] == tile and found in TILES[ITEM]


@pytest.mark.parametrize(
    ("rows", "n", "k", "tile"),
    [
        (437, 1152, 27904, (128, 256)),
        (329, 1536, 13312, (128, 256)),
        (1093, 512, 10496, (128, 256)),
        (128, 2816, 25600, (64, 256)),
    ],
)
def test_parts_that_end_among_split_tiles_need_no_whole_round(
    rows: int, n: int, k: int, tile: tuple[int, int]
) -> None:
    """Scatters of 2 ranks, of which the first part is pushed; the fastest tiles on 2 H100s."""
    found = choose_tile([rows] * 2, [n] * 2, ITEM, UNITS, True, (True, False), k)
    assert found[:2] == tile


def _schedule(name: str, world: int, machine: Machine) -> Schedule:
    """Return the schedule of a name in a report of regret.py."""
    _, name, grain, *more = name.split()
    schedule = replace(Schedule.named(name), grain=int(grain[1:]))
    if "in_step" in more:
        schedule = replace(schedule, pace="in_step")
    if "edge" in more:
        schedule = replace(schedule, taper="edge")
    return schedule.resolve(world, machine)


def _errors(file: str, world: int, gathers: bool, schedule: str) -> list[float]:
    """Return the logs of predicted over measured times of captured calls on random shapes.

    The profiles do not contain these shapes.
    """
    document: dict[str, Any] = json.loads((RESULTS / file).read_text())
    machine, errors = Machine.named(f"h100x{world}"), []
    for case in document["cases"]:
        layout = Layout(case["op"], case["m"], case["n"], case["k"], world)
        facts = facts_of(layout.problem)
        for way, found in case["ms"]["captured"].items():
            if way.startswith(f"ficco {schedule} ") and (facts.gathers or not gathers):
                us = estimate_us(facts, machine, _schedule(way, world, machine), "captured")
                errors.append(math.log(us / (1e3 * found["median"])))
    assert len(errors) > 60
    return errors


@pytest.mark.parametrize(
    ("file", "world", "most"), [("regret_h100x2.json", 2, 0.08), ("regret_h100x4.json", 4, 0.09)]
)
def test_gathers_take_what_is_predicted(file: str, world: int, most: float) -> None:
    """The mean error of gated gathers is 7%."""
    errors = _errors(file, world, True, "gated_1d")
    assert statistics.mean(map(abs, errors)) < most


def test_serial_calls_take_what_their_measured_gemms_predict() -> None:
    """The mean error is 7%."""
    assert statistics.mean(map(abs, _errors("regret_h100x2.json", 2, False, "serial"))) < 0.08
