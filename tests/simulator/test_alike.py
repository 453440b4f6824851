"""Ranks that are alike: predicted from one of them, to the last bit as from the plans of all."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cases import DENSE

from ficco.core.machine import Machine
from ficco.lowering import lower, lower_rank
from ficco.measure import simulator
from ficco.measure.selector import choose
from ficco.measure.selector.candidates import candidates, points
from ficco.measure.selector.facts import facts_of
from ficco.measure.simulator import alike
from ficco.operators import OPERATORS
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan import Plan, RankPlan
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import REGIMES

MACHINES = ("h200x8", "h100x8", "mi300x8", "mesh8", "switch8")


def machine_of(name: str, world: int) -> Machine:
    return replace(Machine.named(name), devices=world)


def a_problem(op: str, world: int, rng: random.Random) -> Problem:
    """Return a problem of which all ranks hold equally much."""
    rows = world * rng.choice((1, 2, 7, 64, 100, 512))
    if op in ("all_to_all_matmul", "matmul_all_to_all"):
        rows *= world
    n, k = world * rng.choice((8, 40, 512)), world * rng.choice((8, 100, 512))
    bias = op not in ("matmul_all_to_all", "embedding_all_to_all") and rng.random() < 0.3
    return Problem.chunked(op, world, rows, n, k, "bfloat16", bias=bias)


@pytest.mark.parametrize("op", DENSE)
@pytest.mark.parametrize("seed", range(6))
def test_predictions_are_those_of_all_plans_to_the_last_bit(op: str, seed: int) -> None:
    rng = random.Random(1000 * OPERATORS.index(op) + seed)
    world = rng.choice((3, 4, 5, 6, 8))
    machine = machine_of(rng.choice(MACHINES), world)
    problem, regime = a_problem(op, world, rng), rng.choice(REGIMES)
    compared = 0
    for schedule in candidates(facts_of(problem), machine):
        if alike.are_alike(problem, schedule, machine):
            compared += 1
            plain = simulator.simulate_ms(lower(problem, schedule), machine, regime)
            assert simulator.predict_ms(problem, schedule, machine, regime) == plain, schedule
    assert compared > 3


def test_several_outputs_are_compared_too() -> None:
    machine, outputs = machine_of("h200x8", 6), (Output((64,) * 6), Output((16,) * 6, "v"))
    problem = Problem("all_gather_matmul", 6, (96,) * 6, 256, outputs, "bfloat16")
    for schedule in candidates(facts_of(problem), machine)[1:]:
        if schedule.transport == "sm":
            continue
        assert alike.are_alike(problem, schedule, machine)
        plain = simulator.simulate_ms(lower(problem, schedule), machine)
        assert simulator.predict_ms(problem, schedule, machine) == plain, schedule


def test_ranks_that_hold_more_or_lie_apart_are_not_alike() -> None:
    machine = machine_of("h200x8", 4)
    schedule = Schedule.named("hetero_fused_1d").resolve(4, machine)
    even = Problem.chunked("all_gather_matmul", 4, 64, 64, 64, "bfloat16")
    assert alike.are_alike(even, schedule, machine)
    uneven = Problem.chunked("all_gather_matmul", 4, 66, 64, 64, "bfloat16")
    assert not alike.are_alike(uneven, schedule, machine)
    assert not alike.are_alike(even, schedule, replace(machine, devices=2))
    columns = Problem.chunked("all_gather_matmul", 4, 64, 66, 64, "bfloat16")
    assert not alike.are_alike(columns, schedule, machine)


@pytest.mark.parametrize("op", DENSE)
def test_a_choice_for_many_ranks_lowers_one_rank_a_candidate(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, lowered = 16, 0
    machine = machine_of("switch8", world)

    def counted(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
        nonlocal lowered
        lowered += 1
        return lower_rank(problem, schedule, rank)

    def refused(problem: Problem, schedule: Schedule) -> Plan:
        raise AssertionError(f"all ranks are lowered: {schedule}")

    monkeypatch.setattr(alike, "lower_rank", counted)
    monkeypatch.setattr(simulator, "lower", refused)
    rows = 256 * world
    problem = Problem.chunked(op, world, rows, 64 * world, 64 * world, "bfloat16")
    made = choose(problem, machine, by="simulator")
    assert 10 < lowered <= len(made.alternatives) + 1


def test_candidates_for_many_ranks_have_words_enough() -> None:
    """Every chunk that goes round a ring has a signal at each turn."""
    machine = machine_of("switch8", 64)
    for schedule in points("matmul_reduce_scatter", 64, machine):
        if schedule.transport == "dma":
            problem = Problem.chunked("matmul_reduce_scatter", 64, 64, 64, 64, "bfloat16")
            lower_rank(problem, schedule, 0)
