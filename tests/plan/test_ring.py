"""Sums that go round a ring: who pushes what to whom, what is kept, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ficco.core.errors import ScheduleError
from ficco.lowering import lower, lower_rank
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan import Plan, Signal
from ficco.plan.schedule import MAX_CHUNKS, Schedule
from ficco.verifier import verify

RING = replace(Schedule.named("ring_1d"), route="rotation")
REDUCING = ["matmul_reduce_scatter", "matmul_all_reduce"]


def ring(op: str, world: int, grain: int = 2, **axes: str) -> Plan:
    problem = Problem.chunked(op, world, 64 * world, 24, 8 * world, "bfloat16")
    return lower(problem, replace(RING, grain=grain, **axes))


@pytest.mark.parametrize("order", ["by_step", "by_peer"])
@pytest.mark.parametrize("cut", ["rows", "columns"])
@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("op", REDUCING)
def test_partial_sums_go_to_the_next_rank_alone(op: str, world: int, cut: str, order: str) -> None:
    plan = ring(op, world, grain=3, cut=cut, order=order)
    assert not verify(plan)
    for entry in plan.ranks:
        assert not any(step.kind == "reduce" for step in entry.steps), "it adds up in a pass"
        pushes = [step for step in entry.steps if step.kind == "copy" and step.lane == "push"]
        assert {step.writes[0].rank for step in pushes} == {(entry.rank + 1) % world}
        assert sum(step.writes[0].area for step in pushes) == 64 * 24 * (world - 1)
        made = [p for step in entry.steps for p in step.products]
        assert not any(p.c.buffer == "recv" for p in made), "a late push would overwrite a sum"


def test_a_sum_begins_behind_its_owner_and_ends_there() -> None:
    """Rank 2 of 4: rows 64 to 128 first, which are rank 1's; its own, from 128, last."""
    plan = ring("matmul_reduce_scatter", 4, grain=1)
    steps = {step.id: step for step in plan.ranks[2].steps}
    products = [steps[f"gemm.0in{turn}"].products[0] for turn in range(4)]
    assert [p.a.row0 for p in products] == [64, 0, 192, 128]
    assert [p.c.buffer for p in products] == ["partial", "partial", "partial", "y0"]
    assert [[came.buffer for came in p.add] for p in products] == [[], *[["recv"]] * 3]
    assert len({came.row0 for p in products for came in p.add}) == 3
    for turn in (1, 2, 3):
        assert steps[f"wait.0in{turn}"].signals == (Signal(2, "data", 1, turn - 1),)


def test_two_chunks_at_a_time_or_all() -> None:
    def made(order: str, op: str = "matmul_all_reduce") -> list[str]:
        plan = ring(op, 2, grain=4, order=order)
        return [step.id for step in plan.ranks[0].steps if step.kind == "gemm"]

    pairs = ["0in0", "1in0", "0in1", "1in1", "2in0", "3in0", "2in1", "3in1"]
    assert made("by_step") == [f"gemm.{name}" for name in pairs]
    every = ["0in0", "1in0", "2in0", "3in0", "0in1", "1in1", "2in1", "3in1"]
    assert made("by_peer") == [f"gemm.{name}" for name in every]
    assert made("by_step", "matmul_reduce_scatter") == made("by_peer"), "nothing is passed on"


def test_sums_are_passed_on_while_later_chunks_go_round() -> None:
    plan = ring("matmul_all_reduce", 3, grain=4)
    order = [step.id for step in plan.ranks[0].steps]
    assert order.index("push.sum1to1") < order.index("gemm.2in0")
    moved = [step for step in plan.ranks[0].steps if step.kind == "local_copy"]
    assert {step.lane for step in moved} == {"collect"}


@pytest.mark.parametrize("op", REDUCING)
@pytest.mark.parametrize("depths", [(0, 5, 0), (0, 0, 3), (4, 0, 0)])
def test_a_rank_without_a_part_of_k_passes_on_what_came(op: str, depths: tuple[int, ...]) -> None:
    output = (Output((9,) * 3, bias=True),)
    for rows in ((4, 3, 5), (0, 7, 0), (6, 0, 1)):
        problem = Problem(op, 3, rows, sum(depths), output, depths=depths)
        assert not verify(lower(problem, RING))


@pytest.mark.parametrize(
    ("op", "axes", "message"),
    [
        ("all_gather_matmul", {}, "sums='apart'"),
        ("matmul_all_reduce", {"sums": "within"}, "sums='apart', or compute='gated'"),
        ("matmul_all_reduce", {"transport": "sm"}, "compute='gated', sums='apart'"),
        ("matmul_all_to_all", {}, "matmul_reduce_scatter and matmul_all_reduce"),
        ("matmul_reduce_scatter", {"compute": "per_step"}, "compute='per_chunk'"),
        ("matmul_reduce_scatter", {"compute": "gated"}, "compute='per_chunk'"),
        ("matmul_all_reduce", {"start": "together"}, "start='local_first'"),
        ("matmul_reduce_scatter", {"pace": "in_step"}, "pace='free'"),
        ("matmul_reduce_scatter", {"grain": MAX_CHUNKS // 3 + 1}, "at most 85"),
        ("matmul_all_reduce", {"grain": MAX_CHUNKS // 4 + 1}, "at most 64"),
    ],
)
def test_what_is_no_ring_names_what_works(op: str, axes: dict[str, object], message: str) -> None:
    problem = Problem.chunked(op, 4, 64, 8, 32)
    with pytest.raises(ScheduleError, match=message):
        lower_rank(problem, replace(RING, **axes), 0)


@pytest.mark.parametrize("name", ["one_shot_sm", "two_shot_sm", "one_shot_pull", "two_shot_pull"])
def test_no_kernel_of_few_rows_has_a_ring(name: str) -> None:
    problem = Problem.chunked("matmul_all_reduce", 4, 8, 64, 32)
    with pytest.raises(ScheduleError, match="sums='apart'"):
        lower_rank(problem, replace(Schedule.named(name), sums="along"), 0)
