"""Many calls with changing data, shapes, schedules and grains, under random delays in every lane.

--calls N (default 300) sets how many per operator; 10000 take some minutes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from arrays import bits
from test_operators import assert_all_right, random_grain, random_problem, schedules_for

import ficco
from ficco.core.machine import Link, Machine
from ficco.lowering import finishing
from ficco.operators import OPERATORS, oracle

SEED = 20261120
MOST_US = 250.0


@dataclass(frozen=True, slots=True)
class LateLink(Link):
    """A fast link whose every transfer has a delay of its own, drawn when a plan is bound."""

    def transfer_us(self, size_bytes: int) -> float:
        return Link.transfer_us(self, size_bytes) + _delay()


@dataclass(frozen=True, slots=True)
class LateMachine(Machine):
    """A machine whose every compute step has a delay of its own, drawn when a plan is bound."""

    def paced_gemm_us(self, flops: float, dtype: str) -> float:
        return _delay()


_draw = random.Random(SEED)


def _delay() -> float:
    """Most delays are none, some are long: ranks and lanes overtake each other."""
    return _draw.random() * MOST_US if _draw.random() < 0.3 else 0.0


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("per", ["pair", "port"])
def test_many_calls_under_random_delays(
    op: str, per: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if per == "port":
        # Pieces leave the window as large ones do.
        monkeypatch.setattr(finishing, "SMALL_BYTES", 0)
    calls = (request.config.getoption("--calls") or 300) // 2
    machine = LateMachine("late", 1, 64, "host", (LateLink("node", per, ((1, 200.0),)),))
    rng = np.random.default_rng(SEED)
    with ficco.Node(3, machine=machine) as node:
        for turn in range(calls):
            problem = random_problem(rng, op, 3)
            choices = schedules_for(problem)
            schedule = choices[int(rng.integers(len(choices)))]
            grain = random_grain(rng, problem, 5)
            given = oracle.inputs(problem, turn)
            found = node.run(problem, given, schedule=schedule, grain=grain)
            about = f"seed {SEED}, call {turn}: {schedule.name} grain {grain} {problem}"
            assert_all_right(problem, oracle.results(problem, given), found, about, schedule)
            if turn % 10 == 0:  # the same call again, with other delays: the same bits
                other = node.run(problem, given, schedule=schedule, grain=grain)
                assert [bits(ys) for ys in other] == [bits(ys) for ys in found], about
