"""What is worked out from times that were made up, so that the right answer is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficco.core.errors import InputError
from ficco.core.machine import Machine
from ficco.lowering import lower_rank
from ficco.measure.profiling.entry_costs import submission_costs, tally
from ficco.measure.profiling.figures import (
    gbps,
    latency_and_rates,
    least_squares,
    links_per,
    net_rates,
    rounded,
    slower,
    slug,
    steady,
)
from ficco.measure.profiling.grids import HOST_GEMMS, gemm_shapes, wide_shapes
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

SIZES = [4096 << shift for shift in range(0, 18, 2)]


@pytest.mark.parametrize(
    ("turns", "want", "taken"),
    [
        ([[10.0, 10.2, 10.4, 90.0, 91.0]], 10.4, 1),  # a median bears two that are spoiled
        ([[10.0, 60.0, 61.0, 62.0, 63.0], [10.1, 10.2, 10.3]], 10.2, 2),
        ([[10.0, 60.0, 61.0], [10.0, 31.0, 32.0], [10.0, 20.0, 21.0], [9.0, 40.0, 41.0]], 20.0, 4),
    ],
)
def test_times_that_a_stall_has_spoiled_are_taken_anew(
    turns: list[list[float]], want: float, taken: int
) -> None:
    left = list(turns)
    assert steady(lambda: left.pop(0)) == want
    assert len(turns) - len(left) == taken


@given(st.floats(0.1, 50), st.floats(1, 2000))
def test_a_link_gives_back_its_latency_and_rate(latency: float, rate: float) -> None:
    times = [(size, latency + size / (rate * 1e3)) for size in SIZES]
    found, rates = latency_and_rates(times)
    # the largest copy's own latency is in the rate that the smallest is freed from
    assert found == pytest.approx(latency, rel=0.01, abs=0.02)
    assert [size for size, _ in rates] == SIZES
    for size, reached in rates[-3:]:
        if latency < 0.05 * size / (rate * 1e3):
            assert reached == pytest.approx(rate, rel=0.01)
    assert all(0 < reached <= 1.02 * rate for _, reached in rates)


def test_noise_of_small_copies_gives_no_rate() -> None:
    times = [(4096, 2.0), (65536, 1.9), (262144, 2.05), (1 << 24, 45.0), (1 << 28, 690.0)]
    latency, rates = latency_and_rates(times)
    assert latency == pytest.approx(2.0, abs=0.02)
    best = max(gbps(size, us - latency) for size, us in times[-2:])
    assert [rate for _, rate in rates[1:3]] == [best] * 2
    assert all(rate <= best for _, rate in rates)


def test_rates_of_rows_are_without_the_latency() -> None:
    found = net_rates([(256, 1 << 24, 402.0), (1024, 1 << 24, 102.0)], 2.0)
    assert found == [(256, pytest.approx((1 << 24) / 400e3)), (1024, pytest.approx(167.77216))]


@pytest.mark.parametrize(
    ("out", "per"),
    [
        ([], "port"),
        ([(1, 390.0)], "port"),
        ([(1, 390.0), (2, 385.0), (3, 230.0)], "port"),
        ([(1, 48.0), (2, 95.0), (7, 330.0)], "pair"),
        ([(1, 48.0), (7, 230.0)], "port"),
    ],
)
def test_what_a_rate_belongs_to(out: Sequence[tuple[int, float]], per: str) -> None:
    assert links_per(out) == per


class TestLeastSquares:
    @given(st.lists(st.floats(0, 30), min_size=3, max_size=3))
    def test_finds_what_was_put_in(self, costs: list[float]) -> None:
        rows = [(1, copies, signals) for copies, signals in ((3, 8), (12, 20), (24, 30), (3, 13))]
        values = [sum(a * b for a, b in zip(row, costs, strict=True)) for row in rows]
        found, error = least_squares(rows, values)
        assert found == pytest.approx(costs, abs=1e-6) and error == pytest.approx(0, abs=1e-6)

    def test_nothing_is_negative(self) -> None:
        rows, values = [(1, 1), (1, 2), (1, 3)], [3.0, 2.0, 1.0]
        found, error = least_squares(rows, values)
        assert found == pytest.approx([2.0, 0.0]) and error == pytest.approx(math.sqrt(2 / 3))
        assert least_squares(rows, [-1.0, -1.0, -1.0])[0] == [0.0, 0.0]

    @given(st.lists(st.lists(st.integers(-9, 9), min_size=3, max_size=3), min_size=4, max_size=6))
    def test_nothing_near_is_better(self, rows: list[list[int]]) -> None:
        values = [1.0, -2.0, 3.0, 4.0, 0.5, -1.0][: len(rows)]

        def off(x: Sequence[float]) -> float:
            return sum(
                (sum(a * b for a, b in zip(row, x, strict=True)) - value) ** 2
                for row, value in zip(rows, values, strict=True)
            )

        found, error = least_squares(rows, values)
        assert min(found) >= 0 and error == pytest.approx(math.sqrt(off(found) / len(rows)))
        for i in range(3):
            for step in (-1e-3, 1e-3):
                other = list(found)
                other[i] = max(0.0, other[i] + step)
                assert off(found) <= off(other) + 1e-9


@pytest.mark.parametrize("world", [2, 4, 8])
def test_costs_of_submission_are_found_in_the_calls_that_are_timed(torch: Any, world: int) -> None:
    from ficco.measure.profiling.gpu import calls

    machine, tallies = Machine.named("cuda"), []
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        problem = Problem.chunked(op, world, 64 * world, 128 * world, 256 * world, "bfloat16")
        for schedule in calls._schedules():
            tallies.append(tally(lower_rank(problem, schedule.resolve(world, machine), 0)))
    assert {t.launches == 0 for t in tallies} == {False, True}
    us = [
        (20 if t.launches else 11 - 4)  # one kernel's call takes 11
        + 9 * t.launches + 4 * t.kernels + 3 * t.copies + 1.5 * t.signals
        for t in tallies
    ]  # fmt: skip
    found = submission_costs(tallies, us, 5.0, 11.0)
    costs = {
        "host_call_us": 20, "host_launch_us": 9, "host_kernel_us": 4, "host_copy_us": 3,
        "host_words_us": 1.5,
    }  # fmt: skip
    assert found == pytest.approx(costs, abs=1e-6)
    # a launch is never cheaper than it was seen to be
    assert submission_costs(tallies, us, 12.0, 11.0)["host_launch_us"] >= 12
    # a kernel is never dearer than a whole call of one
    dear = [each + 60 * (t.kernels - (not t.launches)) for each, t in zip(us, tallies, strict=True)]
    found = submission_costs(tallies, dear, 5.0, 11.0)
    assert found["host_kernel_us"] == 11.0 and found["host_launch_us"] >= 5.0


@pytest.mark.parametrize("grain", [1, 4])
def test_a_plan_is_counted(grain: int) -> None:
    schedule = Schedule(grain=grain, start="local_first", compute="per_chunk")
    problem = Problem.chunked("all_gather_matmul", 4, 64, 64, 64)
    plan = lower_rank(problem, schedule.resolve(4, Machine.named("cuda")), 1)
    found = tally(plan)
    # the own shard is one GEMM; a chunk of three peers is a push, a signal, a wait and a GEMM
    assert found.launches == 1 + 3 * grain and found.copies == 3 * grain
    signals = [step for step in plan.steps if step.kind in ("raise", "wait", "clear")]
    assert found.signals == len(signals) >= 6 * grain


def test_rounding_keeps_four_digits_at_any_depth() -> None:
    given_ = {"a": 123.456789, "b": [(4096, 0.000123456)], "c": {"d": 7, "e": "1.23456"}, "f": True}
    assert rounded(given_) == {
        "a": 123.5, "b": [[4096, 0.0001235]], "c": {"d": 7, "e": "1.23456"}, "f": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("Tesla V100-SXM2-16GB", "tesla-v100-sxm2-16gb"),
    ],
)
def test_a_device_names_its_machine(device: str, name: str) -> None:
    assert slug(device) == name
    with pytest.raises(InputError, match="gives no machine name"):
        slug("--")


def test_side_by_side_nothing_gets_faster() -> None:
    assert slower(3.0, 2.0) == 1.5 and slower(1.9, 2.0) == 1.0


class TestGrids:
    def test_shapes_are_bounded_and_drawn_once(self) -> None:
        found = gemm_shapes(1_200_000_000)
        assert 800 <= len(found) <= 1000 and len(set(found)) == len(found)
        assert all(2.0 * m * n * k <= 6e12 for m, n, k in found)
        assert found == gemm_shapes(1_200_000_000) != sorted(found)
        few = gemm_shapes(10_000_000)
        assert set(few) < set(found)
        assert all(max(m * k, k * n, m * n) <= 10_000_000 for m, n, k in few)

    def test_every_size_is_measured_with_many_others(self) -> None:
        found = gemm_shapes(1_200_000_000)
        for axis, least in ((0, 20), (1, 30), (2, 30)):
            sizes = [shape[axis] for shape in found]
            assert min(sizes.count(size) for size in set(sizes)) >= least

    def test_wide_and_host_shapes(self) -> None:
        wide = wide_shapes(600_000_000)
        assert 50 <= len(wide) <= 80 and all(2.0 * m * n * k <= 3e11 for m, n, k in wide)
        assert 20 <= len(HOST_GEMMS) <= 60
