"""What has come is moved out of the window: how much at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficco.core.machine import Machine
from ficco.lowering import lower
from ficco.lowering.finishing import GROWTH, SMALL_BYTES, Arrival, moves
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan import Region, Signal
from ficco.plan.schedule import Schedule
from ficco.program.passes.copies import joined_copies
from ficco.verifier import verify

H200 = Machine.named("cuda")
MEGA = 1 << 20


def arrivals(sizes: list[int]) -> list[Arrival]:
    """Arrivals of so many bytes."""
    return [
        Arrival(
            f"{i}", (Signal(0, "data", i),),
            (Region(0, "w", i, i + 1, 0, size),), (Region(0, "y", i, i + 1, 0, size),),
        )
        for i, size in enumerate(sizes)
    ]  # fmt: skip


@given(st.lists(st.integers(1, 5 * MEGA), max_size=40))
def test_all_are_moved_in_order_and_the_fewer_at_a_time_the_later(sizes: list[int]) -> None:
    steps = moves(arrivals(sizes), "collect", 1)
    waits, copies = steps[::2], steps[1::2]
    assert [signal.peer for step in waits for signal in step.signals] == list(range(len(sizes)))
    assert [region.row0 for step in copies for region in step.reads] == list(range(len(sizes)))
    for wait, copy in zip(waits, copies, strict=True):
        assert (wait.kind, copy.kind) == ("wait", "local_copy")
        assert [signal.peer for signal in wait.signals] == [region.row0 for region in copy.reads]
        assert [r._replace(buffer="w") for r in copy.writes] == list(copy.reads)
    moved = [sum(region.area for region in step.reads) for step in copies]
    for at, step in enumerate(copies):
        behind = max(moved[at + 1], SMALL_BYTES) * GROWTH if at + 1 < len(moved) else SMALL_BYTES
        assert len(step.reads) == 1 or moved[at] <= behind
        if at:  # one more would have been too much
            assert moved[at] + copies[at - 1].reads[-1].area > behind


@pytest.mark.parametrize(
    ("size", "groups"),
    [(100, [7]), (SMALL_BYTES // 2, [5, 2]), (MEGA, [2, 4, 1]), (16 * MEGA, [2, 4, 1])],
)
def test_of_seven_alike_the_last_is_alone_unless_it_is_small(size: int, groups: list[int]) -> None:
    steps = moves(arrivals([size] * 7), "collect", 1)
    assert [len(step.signals) for step in steps[::2]] == groups


@pytest.mark.parametrize(
    ("op", "m", "n"),
    [("matmul_all_reduce", 1200, 1000), ("matmul_all_to_all", 9600, 1000),
     ("embedding_all_to_all", 1200, 500), ("all_gather_matmul", 1200, 1000)],
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "groups"), [("bfloat16", [6, 1]), ("float32", [2, 4, 1])])
def test_it_goes_by_bytes(op: str, m: int, n: int, dtype: str, groups: list[int]) -> None:
    """Of 150,000 elements an arrival; of one byte each, 3 of them would be moved at last."""
    world = 8
    problem = Problem.chunked(op, world, m, n, 1000, dtype)
    if op == "all_gather_matmul":
        kept = Output((problem.k,) * world, "", "gathered")
        problem = replace(problem, outputs=(*problem.outputs, kept))
    plan = lower(problem, Schedule.named("shard_p2p").resolve(world, H200))
    copies = [step for step in plan.ranks[0].steps if step.id.startswith("move")]
    assert {region.area for step in copies for region in step.reads} == {150_000}
    assert [len(step.reads) for step in copies] == groups


@pytest.mark.parametrize("grain", [1, 3])
@pytest.mark.parametrize("name", ["gated_1d", "gated_sums_1d", "ring_1d", "hetero_unfused_1d"])
@pytest.mark.parametrize("op", ["matmul_all_reduce", "matmul_all_to_all", "all_gather_matmul"])
def test_large_calls_are_right_and_move_by_few_copies(op: str, name: str, grain: int) -> None:
    """Calls of the sizes of models: of small ones, which other tests have, all is moved at once."""
    if name in ("gated_sums_1d", "ring_1d") and op != "matmul_all_reduce":
        pytest.skip("a schedule of reductions")
    world, m = 8, 4096
    problem = Problem.chunked(op, world, m, 8192, 8192, "bfloat16")
    if op == "all_gather_matmul":
        kept = Output((problem.k,) * world, "", "gathered")
        problem = replace(problem, outputs=(*problem.outputs, kept))
    schedule = replace(Schedule.named(name), grain=grain).resolve(world, H200)
    plan = lower(problem, schedule)
    assert not verify(plan)
    for entry in plan.ranks:
        copies = [s for s in entry.steps if s.kind == "local_copy" and s.id.startswith("move")]
        pieces = sum(len(step.reads) for step in copies)
        assert pieces in (world - 1, grain * (world - 1))
        assert len(copies) <= (3 if pieces == world - 1 else 4)
        if pieces == world - 1:  # shards: of one group alone some lie above the own, some below
            calls = sum(len(joined_copies(step.reads, step.writes)) for step in copies)
            assert calls <= len(copies) + 1
