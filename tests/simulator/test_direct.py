"""What plans of one launch are predicted to take, and when they are looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ficco.lowering import lower
from ficco.machine import Costs, Link, Machine
from ficco.problem import Problem
from ficco.schedule import Schedule
from ficco.selector import choose, quick
from ficco.selector.candidates import FEW_ROWS, points
from ficco.selector.facts import facts_of
from ficco.selector.rule import estimate_us
from ficco.simulator import predict_ms, simulate
from ficco.timeline import REGIMES

WORLD, M, N, K = 4, 8, 1024, 512
COSTS = Costs(
    launch_us=2.0, direct_us=1.0, store_us=3.0, call_us=50.0, signal_us=7.0, raise_us=9.0,
    wait_us=5.0, clear_us=5.0, host_call_us=11.0, host_kernel_us=13.0,
)  # fmt: skip
GPUS = Machine(
    "gpus", 1, 4, "cuda", (Link("node", "port", ((1, 10.0),), 100.0),),
    gemm_gflops=(("any", 500.0),), costs=COSTS,
)  # fmt: skip
PROBLEM = Problem.chunked("matmul_all_reduce", WORLD, M, N, K, "bfloat16")
NAMES = ("one_shot_sm", "two_shot_sm")


def by_hand_us(name: str) -> float:
    """Launch, product, bytes out of a rank one behind another, and a flight or two of stores."""
    item, shots = 2, NAMES.index(name) + 1
    product = 2.0 * M * N * K / WORLD / 500e3
    rows = M * N * item
    sent = rows * (WORLD - 1) * (1 if shots == 1 else 2 / WORLD) / 10e3
    return 2.0 + 1.0 + product + sent + shots * 3.0


@pytest.mark.parametrize("name", NAMES)
def test_one_launch_is_what_its_work_and_stores_take(name: str) -> None:
    schedule = Schedule.named(name)
    took = predict_ms(PROBLEM, schedule, GPUS) * 1e3
    by_hand = by_hand_us(name)  # sums of the first chunks may be stored while the last ones fly
    assert took == pytest.approx(by_hand, rel=0.01 if name == "one_shot_sm" else 0.1)
    ruled = estimate_us(facts_of(PROBLEM), GPUS, schedule, "captured")
    assert ruled == pytest.approx(by_hand, rel=0.01)
    called = {each: predict_ms(PROBLEM, schedule, GPUS, each) * 1e3 for each in REGIMES}
    assert called["eager"] == pytest.approx(max(took, 11 + 13)), "the host submits one launch"
    assert called["synchronized"] == pytest.approx(took + 11 + 13, rel=0.05)
    timeline = simulate(lower(PROBLEM, schedule), GPUS)
    assert timeline.duration_us == pytest.approx(took)
    assert {span.lane for span in timeline.spans} == {"compute"}


@pytest.mark.parametrize("name", NAMES)
def test_on_the_host_it_is_steps_like_any_other(name: str) -> None:
    host = replace(GPUS, engine="host")
    alone = predict_ms(PROBLEM, Schedule.named(name), host)
    assert alone > predict_ms(PROBLEM, Schedule.named(name), GPUS) + COSTS.call_us / 1e3


def test_it_is_a_candidate_where_it_is_known_and_rows_are_few() -> None:
    h200 = Machine.named("h200x4")

    def found(op: str, machine: Machine, **more: bool) -> set[str]:
        return {schedule.name for schedule in points(op, 4, machine, **more)} & set(NAMES)

    assert found("matmul_all_reduce", h200, few=True) == set(NAMES)
    assert not found("matmul_all_reduce", h200)
    assert not found("matmul_all_reduce", h200, few=True, gates=False)
    assert not found("matmul_reduce_scatter", h200, few=True)
    assert not found("matmul_all_reduce", Machine.named("switch4"), few=True)
    unknown = replace(h200, costs=replace(h200.costs, store_us=0.0))
    assert not found("matmul_all_reduce", unknown, few=True)


@pytest.mark.parametrize("decide", [choose, quick])
def test_it_is_chosen_for_few_rows_alone(decide: object) -> None:
    h200 = Machine.named("h200x4")
    for rows in (1, 16, FEW_ROWS + 1, 4096):
        problem = Problem.chunked("matmul_all_reduce", 4, rows, 4096, 4096, "bfloat16")
        taken = decide(problem, h200, "captured").schedule.name  # type: ignore[operator]
        assert (taken == "one_shot_sm") == (rows <= 16), f"{rows} rows: {taken}"
