"""What the rule and the simulator choose where ranks of the host engine share cores."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ficco.core.curves import GemmTimes
from ficco.core.errors import MachineError, counted
from ficco.core.machine import Costs, Link, Machine
from ficco.measure import selector, simulator
from ficco.measure.selector.facts import facts_of
from ficco.measure.selector.rule import estimate_us
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

M, N, K = 1024, 256, 512  # copies of 1 GB/s and GEMMs take about as long
DESK = Machine(
    "desk", 1, 64, "host", (Link("node", "port", ((1, 1.0),)),), pacing=False,
    gemm_gflops=(("any", 50.0),), memory_gbps=20.0,
    costs=Costs(launch_us=5.0, raise_us=3.0, signal_us=0.3, call_us=100.0),
)  # fmt: skip


def gather(world: int) -> Problem:
    return Problem.chunked("all_gather_matmul", world, M, N * world, K, "float32")


def choices(cores: int, world: int) -> list[selector.Choice]:
    machine = replace(DESK, cores=cores)
    return [selector.choose(gather(world), machine, "eager", by=by) for by in ("rule", "simulator")]


@pytest.mark.parametrize("world", [2, 4])
def test_with_cores_enough_copies_are_hidden(world: int) -> None:
    for choice in choices(2 * world, world):
        assert choice.schedule.name != "serial"


@pytest.mark.parametrize(("cores", "world"), [(1, 2), (2, 2), (2, 4), (4, 8)])
def test_where_copies_take_cores_from_gemms_serial_is_best(cores: int, world: int) -> None:
    for choice in choices(cores, world):
        assert choice.schedule.name == "serial"
        shared = f"{world} ranks share {counted(cores, 'core')}, so"
        assert any(shared in why for why in choice.reasons)


def test_half_the_cores_take_twice_as_long() -> None:
    machine, fewer = replace(DESK, cores=4), replace(DESK, cores=2)
    plain = Schedule.named("serial").resolve(4, DESK)
    once, twice = (
        estimate_us(facts_of(gather(4)), each, plain, "eager") for each in (machine, fewer)
    )
    assert (twice - 100) / (once - 100) == pytest.approx(2, rel=0.02)
    predicted = [
        1e3 * simulator.predict_ms(gather(4), plain, each, "eager") for each in (machine, fewer)
    ]
    assert predicted == [pytest.approx(once, rel=0.1), pytest.approx(twice, rel=0.1)]


def test_cores_are_of_the_host_engine() -> None:
    with pytest.raises(MachineError, match="cores=2 with engine='cuda'"):
        replace(DESK, engine="cuda", cores=2)


def test_on_a_core_times_follow_the_operations() -> None:
    """No tiles: beyond the largest point and between points alike."""
    rate = 1e-5
    points = tuple(
        (m, n, k, 1.0 + 2.0 * m * n * k * rate)
        for m, n, k in ((16, 32, 32), (64, 256, 64), (32, 512, 256), (256, 256, 256))
    )
    times = GemmTimes(points, units=1, tiled=False)
    for m, n, k in ((16, 32, 32), (65, 129, 63), (1024, 512, 1024), (512, 2048, 256)):
        assert times.us(m, n, k) == pytest.approx(1.0 + 2.0 * m * n * k * rate, rel=0.02)
