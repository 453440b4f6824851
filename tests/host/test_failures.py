"""What happens when a call cannot end: an error that names rank, step and signal, never a hang."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from arrays import assert_right, inputs

import ficco
from ficco.core.machine import Link, Machine
from ficco.engine.compute import named
from ficco.lowering import lower
from ficco.operators.problem import Problem
from ficco.plan import Plan, Step
from ficco.plan.schedule import Schedule
from ficco.runtime.failures import error_of
from ficco.runtime.node_runtime import NodeRuntime
from ficco.verifier import verify

HOST = Machine.named("host")


def plan(world: int = 3, name: str = "hetero_fused_1d") -> Plan:
    problem = Problem.chunked("all_gather_matmul", world, 12, 6, 8)
    return lower(problem, Schedule.named(name).resolve(world, HOST))


def without(given: Plan, rank: int, step_id: str) -> Plan:
    entry = given.ranks[rank]
    steps = tuple(step for step in entry.steps if step.id != step_id)
    assert len(steps) == len(entry.steps) - 1
    ranks = list(given.ranks)
    ranks[rank] = entry._replace(steps=steps)
    return given._replace(ranks=tuple(ranks))


def arrays(given: Plan) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            b.name: rng.standard_normal((b.rows, b.cols)).astype(np.float32)
            for b in entry.buffers
            if b.role in ("input", "weight", "output")
        }
        for entry in given.ranks
    ]


@pytest.fixture
def runtime():
    runtime = NodeRuntime(3, HOST, named("numpy"), timeout_s=0.6)
    yield runtime
    runtime.close()


class TestLostSignal:
    def test_it_ends_in_an_error_that_names_rank_step_and_signal(self, runtime) -> None:
        broken = without(plan(), 2, "sent.1to0")
        assert verify(broken)
        begin = time.monotonic()
        given = arrays(broken)
        with pytest.raises(ficco.TimeoutExceeded) as caught:
            runtime.execute_plan(broken, given)
        assert time.monotonic() - begin < 10
        assert all(np.isnan(mine["y0"]).all() for mine in given)  # nothing looks like a result
        error = caught.value
        assert (error.rank, error.step) == (0, "wait.step1")
        assert "data[2][1]@0" in error.signal
        assert "Rank 2 should have set it" in str(error)
        assert error.seconds >= 0.6

    def test_the_runtime_refuses_calls_until_it_is_reset(self, runtime) -> None:
        broken, good = without(plan(), 2, "sent.1to0"), plan()
        with pytest.raises(ficco.TimeoutExceeded):
            runtime.execute_plan(broken, arrays(broken))
        with pytest.raises(ficco.EngineError, match="reset"):
            runtime.execute_plan(good, arrays(good))
        runtime.reset()
        for _ in range(3):
            given = arrays(good)
            runtime.execute_plan(good, given)
            xs, ws = [a["x"] for a in given], [a["w"] for a in given]
            assert_right(xs, ws, [a["y0"] for a in given])

    def test_in_a_gated_part(self, runtime) -> None:
        broken = without(plan(name="gated_1d"), 1, "sent.0to2")
        with pytest.raises(ficco.TimeoutExceeded) as caught:
            runtime.execute_plan(broken, arrays(broken))
        assert caught.value.rank == 2
        assert caught.value.step.startswith("gemm[")

    def test_a_free_that_never_comes_stops_the_next_call_but_one(self, runtime) -> None:
        """Every copy of the window is handed over once; the second use of a copy finds it taken."""
        broken, good = without(plan(), 1, "compute.leave"), plan()
        runtime.execute_plan(broken, arrays(broken))
        runtime.execute_plan(good, arrays(good))
        with pytest.raises(ficco.TimeoutExceeded) as caught:
            runtime.execute_plan(good, arrays(good))
        # waits for free[1] and for the data that are held back by it end at the same moment
        assert any(name in caught.value.signal for name in ("free[1]", "data["))


@pytest.mark.parametrize(
    "row, word_rank, said",
    [
        (
            4,
            1,
            "step 'row 4': a signal .* known, because the memory .* read. All run. timeout_s",
        ),
        (4, -1, "step 'row 4': a signal did not arrive within 2.5 s. The .* not known. All run."),
        (-1, -1, "step 'no longer known': a signal did not arrive within 2.5 s. The .* known."),
    ],
)
def test_a_signal_that_is_not_known_is_not_guessed(row: int, word_rank: int, said: str) -> None:
    failure = (1, row, word_rank, -1, "timeout", 2.5, 0, 0)
    error = error_of(failure, lambda rank, row: f"row {row}", "reset()", 2.0, "All run.")
    assert isinstance(error, ficco.TimeoutExceeded)
    assert (error.rank, error.signal) == (1, "a signal")
    assert re.search(said, str(error)), error


def test_a_call_of_another_kind_is_named_by_its_digest(runtime) -> None:
    mine, theirs = plan(), plan(name="hetero_unfused_1d")
    mixed = mine._replace(ranks=(mine.ranks[0], theirs.ranks[1], mine.ranks[2]))
    call = runtime._bind(mixed.problem, mixed.schedule, mixed)
    call.ranks[1] = runtime._engine.bind(runtime._places[-1], 1, mixed.ranks[1], theirs.digest)
    given = arrays(mixed)
    with pytest.raises(ficco.TimeoutExceeded, match="runs another call"):
        runtime._run(call, given)


def test_an_error_in_one_rank_stops_all(runtime) -> None:
    good = plan()
    given = arrays(good)
    given[1]["w"] = given[1]["w"][:3]  # what Node would refuse
    begin = time.monotonic()
    with pytest.raises(ficco.EngineError, match="rank 1 failed"):
        runtime.execute_plan(good, given)
    assert time.monotonic() - begin < 5
    runtime.reset()
    runtime.execute_plan(good, arrays(good))


def test_an_interrupt_stops_ranks_that_wait_for_others(runtime, monkeypatch) -> None:
    good, start = plan(), runtime._threads.start
    given = arrays(good)

    def interrupted(job, ranks):
        start(lambda rank: job(rank) if rank < 2 else None, ranks)
        raise KeyboardInterrupt

    runtime.timeout_s = 60
    monkeypatch.setattr(runtime._threads, "start", interrupted)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        runtime.execute_plan(good, given)
    assert time.monotonic() - begin < 10
    monkeypatch.undo()
    runtime.reset()
    runtime.execute_plan(good, arrays(good))


def test_a_timeout_shorter_than_the_links_need() -> None:
    slow = Machine("slow", 1, 2, "host", (Link("node", "pair", ((1, 0.0001),)),))
    xs, ws = inputs(2, 64, 4, 256)  # 32 KiB a shard: a third of a second each
    with ficco.Node(2, machine=slow, timeout_s=0.15) as node:
        with pytest.raises(ficco.TimeoutExceeded, match=r"rank [01], step 'wait.step0'.*data"):
            node.all_gather_matmul(xs, ws, grain=1)
        node.reset()
        node.timeout_s = 20
        assert_right(xs, ws, node.all_gather_matmul(xs, ws, grain=1))


def test_a_closed_node_says_so() -> None:
    node = ficco.Node(2)
    node.close()
    xs, ws = inputs(2, 4, 4, 4)
    with pytest.raises(ficco.EngineError, match="closed"):
        node.all_gather_matmul(xs, ws)
    node.close()


def test_steps_that_the_host_engine_has_not_are_named(runtime) -> None:
    good = plan()
    entry = good.ranks[0]
    extra = Step("all", "c", "collective", "sm", collective="all_gather")
    ranks = (entry._replace(steps=(*entry.steps, extra)), *good.ranks[1:])
    with pytest.raises(ficco.EngineError, match="has no collectives; use target 'library'"):
        runtime.execute_plan(good._replace(ranks=ranks), arrays(good))


def test_computing_in_a_peers_window_is_refused(runtime) -> None:
    good = plan()
    entry = good.ranks[0]
    at = next(i for i, step in enumerate(entry.steps) if step.id == "gemm.step0")
    step = entry.steps[at]
    product = step.products[0]
    there = product._replace(c=product.c._replace(rank=1, buffer="gathered"))
    steps = (*entry.steps[:at], step._replace(products=(there,)), *entry.steps[at + 1 :])
    ranks = (entry._replace(steps=steps), *good.ranks[1:])
    with pytest.raises(ficco.EngineError, match="own rank's buffers"):
        runtime.execute_plan(good._replace(ranks=ranks), arrays(good))


def test_a_plan_written_by_hand_runs(runtime) -> None:
    """Copies on a compute lane, `after` between lanes, a copy in two halves."""
    from pathlib import Path

    from ficco.plan.plan_json import loads

    by_hand = loads((Path(__file__).parents[1] / "plan" / "by_hand.json").read_text())
    small = NodeRuntime(2, HOST, named("numpy"), timeout_s=5)
    try:
        for _ in range(20):
            given = arrays(by_hand)
            small.execute_plan(by_hand, given)
            assert_right([a["x"] for a in given], [a["w"] for a in given], [a["y0"] for a in given])
    finally:
        small.close()
