"""What plans of one launch are predicted to take, and when they are looked at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ficco.core.machine import Costs, Link, Machine
from ficco.lowering import lower
from ficco.measure.selector import choose, quick
from ficco.measure.selector.candidates import FEW_ROWS, are_few, candidates, points
from ficco.measure.selector.facts import facts_of
from ficco.measure.selector.rule import HOST_AFTER_WAIT, estimate_us
from ficco.measure.simulator import predict_ms, simulate
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import REGIMES

WORLD, M, N, K = 4, 8, 1024, 512
COSTS = Costs(
    launch_us=2.0, direct_us=1.0, store_us=3.0, call_us=50.0, signal_us=7.0, raise_us=9.0,
    wait_us=5.0, clear_us=5.0, host_call_us=11.0, host_kernel_us=13.0,
)  # fmt: skip
GPUS = Machine(
    "gpus", 1, 4, "cuda", (Link("node", "port", ((1, 10.0),), 100.0),),
    gemm_gflops=(("any", 500.0),), costs=COSTS,
)  # fmt: skip
NAMES = ("one_shot_sm", "two_shot_sm")
PROBLEM_OF = dict.fromkeys(
    NAMES, Problem.chunked("matmul_all_reduce", WORLD, M, N, K, "bfloat16")
) | {"gather_sm": Problem.chunked("all_gather_matmul", WORLD, M, N, K, "bfloat16")}


def by_hand_us(name: str) -> float:
    """Launch, product, bytes out of a rank one behind another, and a flight or two of stores.

    And a gather's rendezvous by signals.
    """
    item, shots = 2, 2 if name == "two_shot_sm" else 1
    product = 2.0 * M * N * K / WORLD / 500e3
    rows = M // WORLD * K * item if name == "gather_sm" else M * N * item
    sent = rows * (WORLD - 1) * (1 if shots == 1 else 2 / WORLD) / 10e3
    return 2.0 + (1.0 if name == "gather_sm" else 0.0) + product + sent + shots * 3.0


@pytest.mark.parametrize("name", PROBLEM_OF)
def test_one_launch_is_what_its_work_and_stores_take(name: str) -> None:
    schedule, problem = Schedule.named(name), PROBLEM_OF[name]
    took = predict_ms(problem, schedule, GPUS) * 1e3
    by_hand = by_hand_us(name)  # sums of the first chunks may be stored while the last ones fly
    assert took == pytest.approx(by_hand, rel=0.1 if name == "two_shot_sm" else 0.01)
    ruled = estimate_us(facts_of(problem), GPUS, schedule, "captured")
    assert ruled == pytest.approx(by_hand, rel=0.01)
    called = {each: predict_ms(problem, schedule, GPUS, each) * 1e3 for each in REGIMES}
    assert called["eager"] == pytest.approx(max(took, 11 + 13)), "the host submits one launch"
    assert called["synchronized"] == pytest.approx(took + 11 + 13, rel=0.05)
    known = replace(GPUS, costs=replace(COSTS, host_direct_us=17.0))  # for the whole call
    assert 1e3 * predict_ms(problem, schedule, known, "synchronized") == pytest.approx(took + 17)
    for on, host in ((GPUS, 11 + 13), (known, 17)):
        us = estimate_us(facts_of(problem), on, schedule, "synchronized")
        assert us == pytest.approx(ruled + HOST_AFTER_WAIT * host)
    timeline = simulate(lower(problem, schedule), GPUS)
    assert timeline.duration_us == pytest.approx(took)
    assert {span.lane for span in timeline.spans} == {"compute"}


@pytest.mark.parametrize("shots", ["one", "two"])
def test_sums_that_read_products_take_the_reads_longer_than_the_gemm(shots: str) -> None:
    """And a launch, and what ranks need to meet: half as much again with two shots."""
    costs = replace(COSTS, store_us=1.0, pull_us=8.0, peer_reads=1.25, host_direct_us=17.0)
    gpus, problem = replace(GPUS, costs=costs), PROBLEM_OF["one_shot_sm"]
    schedule = Schedule.named(f"{shots}_shot_pull")
    product = 2.0 * M * N * K / WORLD / 500e3
    read = M * N * 2 * (WORLD - 1) * (1 if shots == "one" else 2 / WORLD) / 10e3
    by_hand = 2.0 + product + 8.0 * (1 if shots == "one" else 1.5) + 1.25 * read
    assert estimate_us(facts_of(problem), gpus, schedule, "captured") == pytest.approx(by_hand)
    took = predict_ms(problem, schedule, gpus) * 1e3
    assert took == pytest.approx(by_hand, rel=0.05)
    host = 17.0 + costs.host_launch_us
    ruled = estimate_us(facts_of(problem), gpus, schedule, "synchronized")
    assert ruled == pytest.approx(by_hand + HOST_AFTER_WAIT * host)


def test_sums_that_read_products_are_candidates_where_their_cost_is_known() -> None:
    known = replace(GPUS, costs=replace(COSTS, pull_us=8.0))

    def found(problem: Problem, machine: Machine, **words: bool) -> set[str]:
        names = {s.name for s in candidates(facts_of(problem), machine, **words)}
        return names & {"one_shot_pull", "two_shot_pull"}

    many = Problem.chunked("matmul_all_reduce", WORLD, 5000, N, K)
    biased = replace(many, outputs=(replace(many.outputs[0], bias=True),))
    assert found(many, known) == {"one_shot_pull", "two_shot_pull"}
    assert found(biased, known) == {"two_shot_pull"}
    assert not found(many, GPUS) and not found(many, replace(known, engine="host"))
    assert not found(many, known, gates=False) and not found(many, known, alone=False)
    assert not found(Problem.chunked("matmul_reduce_scatter", WORLD, 5000, N, K), known)


def test_a_gather_multiplies_no_faster_than_a_gated_launch() -> None:
    """Several weights read one gather; what keeps x besides copies it once more."""
    schedule, problem = Schedule.named("gather_sm"), PROBLEM_OF["gather_sm"]
    slower = replace(GPUS, costs=replace(COSTS, direct_gemm=1.5))
    product = 2.0 * M * N * K / WORLD / 500e3
    for us in (
        1e3 * (predict_ms(problem, schedule, slower) - predict_ms(problem, schedule, GPUS)),
        estimate_us(facts_of(problem), slower, schedule, "captured")
        - estimate_us(facts_of(problem), GPUS, schedule, "captured"),
    ):
        assert us == pytest.approx(0.5 * product)
    halves = tuple(Output((N // WORLD // 2,) * WORLD, f"w{i}") for i in range(2))
    several = replace(problem, outputs=halves)
    once = predict_ms(several, schedule, GPUS)
    assert once == pytest.approx(predict_ms(problem, schedule, GPUS))
    kept = replace(several, outputs=(*halves, Output((K,) * WORLD, "", "gathered")))
    copied = 1e-3 * GPUS.stream_us(2 * 2 * M * K)
    assert predict_ms(kept, schedule, GPUS) == pytest.approx(once + copied)


@pytest.mark.parametrize("name", PROBLEM_OF)
def test_on_the_host_it_is_steps_like_any_other(name: str) -> None:
    host, problem = replace(GPUS, engine="host"), PROBLEM_OF[name]
    alone = predict_ms(problem, Schedule.named(name), host)
    assert alone > predict_ms(problem, Schedule.named(name), GPUS) + COSTS.call_us / 1e3


def test_it_is_a_candidate_where_it_is_known_and_rows_are_few() -> None:
    h200 = Machine.named("h200x4")

    def found(op: str, machine: Machine, **more: Any) -> set[str]:
        return {schedule.name for schedule in points(op, 4, machine, **more)} & set(PROBLEM_OF)

    assert found("matmul_all_reduce", h200, stores="both") == set(NAMES)
    assert found("all_gather_matmul", h200, stores="both") == {"gather_sm"}
    assert found("matmul_all_reduce", h200, stores="two") == {"two_shot_sm"}
    assert not found("matmul_all_reduce", h200)
    assert not found("matmul_all_reduce", h200, stores="both", gates=False)
    assert not found("matmul_reduce_scatter", h200, stores="both")
    assert not found("matmul_all_reduce", Machine.named("switch4"), stores="both")
    unknown = replace(h200, costs=replace(h200.costs, store_us=0.0))
    assert not found("matmul_all_reduce", unknown, stores="both")


def test_a_gather_that_one_launch_does_not_do_has_no_such_candidate() -> None:
    def few(*outputs: Output, rows: int = 8) -> bool:
        return are_few(facts_of(Problem("all_gather_matmul", 2, (rows, 0), 64, outputs)))

    rows, kept = Output((9, 9), "w0"), Output((64, 64), "", "gathered")
    assert few(rows, kept) and few(*[rows] * 4) and few(rows, rows=FEW_ROWS)
    assert not few(rows, rows=FEW_ROWS + 1)
    assert not few(*[rows] * 5) and not few(rows, kept, kept)
    assert not few(rows, Output((9, 9), "w1", "contraction"))
    scatter = Problem.chunked("matmul_reduce_scatter", 2, 8, 8, 8)
    reduce = Problem.chunked("matmul_all_reduce", 2, 8, 8, 8)
    assert are_few(facts_of(reduce)) and not are_few(facts_of(scatter))


def test_a_gather_of_few_rows_has_to_promise_enough() -> None:
    h200 = Machine.named("h200x4")
    for rows, chosen in ((8, True), (FEW_ROWS + 1, False)):
        problem = Problem.chunked("all_gather_matmul", 4, rows, 8192, 8192, "bfloat16")
        found = choose(problem, h200, by="simulator")
        assert (found.schedule.name == "gather_sm") == chosen, found.schedule.name
        five = replace(problem, outputs=(Output((410,) * 4, "w"),) * 5)
        assert choose(five, h200, by="simulator").schedule.transport != "sm"
    wide = Problem.chunked("all_gather_matmul", 4, 8, 57344, 8192, "bfloat16")
    assert choose(wide, h200, by="simulator").schedule.name == "serial", "its product takes longer"


@pytest.mark.parametrize("decide", [choose, quick])
def test_it_is_chosen_for_few_rows_alone(decide: object) -> None:
    h200 = Machine.named("h200x4")
    for rows in (1, 16, FEW_ROWS + 1, 4096):
        problem = Problem.chunked("matmul_all_reduce", 4, rows, 4096, 4096, "bfloat16")
        taken = decide(problem, h200, "captured").schedule.name  # type: ignore[operator]
        assert (taken == "one_shot_sm") == (rows <= 16), f"{rows} rows: {taken}"
