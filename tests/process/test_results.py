"""What ranks that are processes compute: the oracle's results, bit for bit those of one process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from ranks import HOST, SCHEDULES, Ranks, gathering, posed

from ficco.engine.compute import dtype_of, named
from ficco.lowering import lower
from ficco.operators import OPERATORS, oracle
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan.schedule import Schedule
from ficco.runtime.node_runtime import NodeRuntime

GEMMS = OPERATORS[:5]


@contextmanager
def group(four: Ranks, members: list[int], timeout_s: float = 20, **words: Any) -> Iterator[str]:
    """Open a group of some ranks, and close it."""
    name = "-".join(map(str, members))
    four.good(members, "open", name=name, timeout_s=timeout_s, **words)
    yield name
    four.good(members, "close", name=name)


def in_one_process(problem: Problem, schedule: str, seed: int = 0) -> list[list[str]]:
    """Return digests of the outputs by rank, as NodeRuntime computes them."""
    resolved = Schedule.named(schedule).resolve(problem.world, HOST)
    given = oracle.inputs(problem, seed)
    plan = lower(problem, resolved)
    arrays = []
    for entry, mine in zip(plan.ranks, given, strict=True):
        outputs = {
            b.name: np.zeros((b.rows, b.cols), dtype_of(b.dtype))
            for b in entry.buffers
            if b.role == "output"
        }
        arrays.append({**mine, **outputs})
    runtime = NodeRuntime(problem.world, HOST, named("numpy"), timeout_s=20)
    try:
        runtime.execute(problem, resolved, arrays)
    finally:
        runtime.close()
    return [
        [
            hashlib.sha256(mine[b.name].tobytes()).hexdigest()
            for b in entry.buffers
            if b.role == "output"
        ]
        for entry, mine in zip(plan.ranks, arrays, strict=True)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_schedules_as_in_one_process(four: Ranks, world: int, dtype: str) -> None:
    problem = gathering(world, 515, 257, 129, dtype)
    members = list(range(world))
    with group(four, members) as name:
        for schedule in SCHEDULES:
            bits = four.right(members, posed(name, problem, schedule, seed=world, times=3))
            assert bits == in_one_process(problem, schedule, world), schedule


@pytest.mark.parametrize("op", GEMMS)
def test_all_operators_as_in_one_process(four: Ranks, op: str) -> None:
    problem = Problem.chunked(op, 3, 131, 67, 65, bias=op != "matmul_all_to_all")
    members = [1, 2, 3]
    with group(four, members) as name:
        for schedule in ("serial", "hetero_fused_1d", "gated_1d"):
            bits = four.right(members, posed(name, problem, schedule, times=4))
            assert bits == in_one_process(problem, schedule), schedule


def test_embeddings_as_in_one_process(four: Ranks) -> None:
    problem = Problem(
        "embedding_all_to_all", 2, (5, 4), 16, (Output((16, 16)),),
        tables=((7, 3), (6,)), lookups=((11, 9), (8,)),
    )  # fmt: skip
    with group(four, [0, 1]) as name:
        bits = four.right([0, 1], posed(name, problem, "serial", times=3))
        assert bits == in_one_process(problem, "serial")


def test_shapes_that_change_and_grow(four: Ranks) -> None:
    members = [0, 1, 2]
    with group(four, members) as name:
        windows = 0
        for turn, m in enumerate((3, 700, 5, 64, 2100, 1, 700, 2100)):
            problem = gathering(3, m, 33, 1 + m % 64)
            four.right(members, posed(name, problem, SCHEDULES[turn % 7], seed=turn))
            held = four.good(members, "state", name=name)
            assert len({value["windows"] for value in held.values()}) == 1
            assert held[0]["windows"] >= windows
            windows = held[0]["windows"]
            # What was outgrown is not mapped any more: control, words, and a window a rank.
            assert all(value["shared"] == 2 + 3 for value in held.values())
        assert windows >= 3 * 2 * (1400 * 53 * 4)


def test_two_groups_side_by_side(four: Ranks) -> None:
    """{0, 2} and {1, 3} at once, with different work and different growth."""
    even, odd = [0, 2], [1, 3]
    with group(four, even) as first, group(four, odd) as second:
        for turn in range(6):
            one = gathering(2, 40 * (turn + 1), 30, 20)
            other = gathering(2, 11, 200, 31 * (6 - turn), "bfloat16")
            for rank in even:
                four.all[rank].send("call", **posed(first, one, "shard_p2p", turn, times=20))
            for rank in odd:
                four.all[rank].send("call", **posed(second, other, "gated_1d", turn, times=30))
            for rank in (*odd, *even):
                answer = four.all[rank].receive()
                assert not answer["value"]["wrong"], (rank, answer)


def test_a_rank_in_several_groups(four: Ranks) -> None:
    with (
        group(four, [0, 1, 2, 3]) as whole,
        group(four, [1, 2]) as pair,
        group(four, [3]) as alone,
    ):
        for _ in range(3):
            four.right(range(4), posed(whole, gathering(4, 64, 16, 8), "hetero_unfused_1d"))
            four.right([1, 2], posed(pair, gathering(2, 300, 16, 80), "serial"))
            four.right([3], posed(alone, gathering(1, 30, 16, 80), "hetero_fused_1d"))


def test_a_device_mesh_is_a_group(four: Ranks) -> None:
    with group(four, [0, 1], mesh=True) as name:
        four.right([0, 1], posed(name, gathering(2, 20, 30, 40), "hetero_fused_1d"))


def test_links_are_paced_between_processes(four: Ranks) -> None:
    """Two shards of 1 MB a rank, over links of 0.01 GB/s each: 0.1 s."""
    problem = gathering(2, 2 * 1000, 4, 250)
    with group(four, [0, 1], gbps=0.01) as name:
        call = posed(name, problem, "serial")
        answers = four.ask([0, 1], "call", **call)
        assert not any(answer["value"]["wrong"] for answer in answers.values())
        assert min(answer["seconds"] for answer in answers.values()) >= 0.1
    with group(four, [0, 1, 2], gbps=5) as name:
        bits = four.right(
            range(3), posed(name, gathering(3, 300, 40, 50), "hetero_fused_1d", times=20)
        )
        assert bits == in_one_process(gathering(3, 300, 40, 50), "hetero_fused_1d")


def test_the_timeline_is_of_this_rank(four: Ranks) -> None:
    with group(four, [0, 1]) as name:
        four.right([0, 1], posed(name, gathering(2, 20, 30, 40), "hetero_fused_1d"))
        found = four.good([0, 1], "timeline", name=name)
    assert {rank: spans[0] for rank, spans in found.items()} == {0: 0, 1: 1}
    assert all(len(spans) == 2 and spans[1] > 5 for spans in found.values())


def test_nothing_is_left_behind(four: Ranks) -> None:
    with group(four, [0, 1, 2]):
        pass  # torch has opened what it keeps
    before = four.good(range(3), "state", name="")
    for _ in range(3):
        with group(four, [0, 1, 2]) as name:
            four.right(range(3), posed(name, gathering(3, 90, 30, 40), "shard_p2p"))
    assert four.good(range(3), "state", name="") == before
