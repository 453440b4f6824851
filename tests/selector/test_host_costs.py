"""What calls take the host, of native code or a library's launches, and which one is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ficco.core.machine import SLICED_ROWS, Machine
from ficco.measure import simulator
from ficco.measure.selector import choose, quick
from ficco.measure.selector.candidates import candidates
from ficco.measure.selector.facts import facts_of
from ficco.measure.selector.rule import estimate_us
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

H100 = Machine.named("h100x2")
COSTS = replace(H100.costs, host_words_us=0.0)  # so that copies and kernels alone count


def problem_of(op: str, m: int, n: int = 512, k: int = 512) -> Problem:
    return Problem.chunked(op, 2, m, n, k, "bfloat16")


@pytest.mark.parametrize(
    ("op", "kernels"), [("all_gather_matmul", 1), ("matmul_reduce_scatter", 2)]
)
def test_a_gated_call_costs_the_host_what_one_kernel_does_and_its_copies(
    op: str, kernels: int
) -> None:
    problem, schedule = problem_of(op, 64), Schedule.named("gated_1d").resolve(2, H100)
    slow = replace(H100, costs=replace(COSTS, host_direct_us=500.0))  # so that the host decides
    expected = 500.0 + (kernels - 1) * COSTS.host_kernel_us + schedule.chunks * COSTS.host_copy_us
    assert estimate_us(facts_of(problem), slow, schedule, "eager") == pytest.approx(expected)
    simulated = 1e3 * simulator.predict_ms(problem, schedule, slow, "eager")
    assert simulated == pytest.approx(expected, rel=0.05)
    unknown = replace(H100, costs=replace(COSTS, host_direct_us=0.0, host_call_us=500.0))
    expected = 500.0 + kernels * COSTS.host_kernel_us + schedule.chunks * COSTS.host_copy_us
    assert estimate_us(facts_of(problem), unknown, schedule, "eager") == pytest.approx(expected)


@pytest.mark.parametrize("by", ["rule", "simulator"])
def test_calls_of_little_work_are_gated_where_the_host_decides(by: str) -> None:
    """In a graph the host has no part in it, and a launch that waits gains nothing."""
    for op in ("all_gather_matmul", "all_to_all_matmul"):
        problem = problem_of(op, 512, 2048, 1024)
        assert choose(problem, H100, "eager", by=by).schedule.name == "gated_1d"
        assert choose(problem, H100, "captured", by=by).schedule.name == "serial"


def test_programs_that_multiply_slices_are_slower_than_the_library_for_many_rows() -> None:
    for m, k in ((SLICED_ROWS, 4096), (8, 512)):
        assert H100.sliced_gemm_us(m, 896, k, "bfloat16", 56) == H100.gemm_us(m, 896, k, "bfloat16")
    # Measured: 62 us with 15 us around it, and 26 to 29 us with 5 us around it.
    assert H100.sliced_gemm_us(93, 896, 12096, "bfloat16", 56) == pytest.approx(47, rel=0.2)
    assert H100.sliced_gemm_us(287, 896, 896, "bfloat16", 56) == pytest.approx(21, rel=0.1)
    assert H100.sliced_gemm_us(358, 896, 768, "bfloat16", 56) == pytest.approx(23, rel=0.1)


@pytest.mark.parametrize("m", [65, 287, 384, 385, 512, 513])
def test_sums_in_one_shot_are_for_as_many_rows_as_a_kernel_multiplies(m: int) -> None:
    names = {each.name for each in candidates(facts_of(problem_of("matmul_all_reduce", m)), H100)}
    assert ("one_shot_sm" in names) == (m <= 384)
    assert ("two_shot_sm" in names) == (m <= 512)


def test_of_more_than_few_rows_one_shot_is_taken_where_the_host_decides() -> None:
    """The product of two shots is a library's launch, which takes the host longer."""
    problem = problem_of("matmul_all_reduce", 287, 896, 1792)
    assert quick(problem, H100, "eager").schedule.name == "one_shot_sm"
    assert quick(problem, H100, "captured").schedule.name == "two_shot_sm"


def test_of_many_ranks_hopeless_schedules_are_not_simulated() -> None:
    """What would take many times as long as the best, at fine grains, takes longest to simulate."""
    machine = replace(Machine.named("h200x4"), devices=64)
    for world, fewer in ((16, False), (32, True)):
        problem = Problem.chunked("matmul_all_reduce", world, 16384, 8192, 8192, "bfloat16")
        every = candidates(facts_of(problem), machine)
        found = choose(problem, machine, by="simulator")
        kept = {found.schedule, *(schedule for schedule, _ in found.alternatives)}
        assert (len(kept) < len(every)) == fewer
        assert any("were not simulated" in reason for reason in found.reasons) == fewer
        ms = {each: estimate_us(facts_of(problem), machine, each, "captured") for each in every}
        assert all(ms[each] > 2 * min(ms.values()) for each in set(every) - kept)
        assert every[0] in kept
