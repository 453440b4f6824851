"""What happens when a rank dies, stops, is late, or makes another call: an error, soon, for all."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks, gathering, posed, shared_memory, stopped

from ficco.operators.problem import Problem

KILLS = int(os.environ.get("FICCO_KILLS", "10"))  # 100 before a release
SMALL = gathering(3, 60, 20, 40)
LONG_S = 20.0
EXPERTS = {"dispatch_matmul": "two_waves", "matmul_combine": "push_sm"}  # with their schedules
GATHERS = ["all_gather_matmul"] * 3
MANY = 100_000  # calls: for longer than any test


def refused(four: Ranks, members: Sequence[int], name: str) -> None:
    """Hold that further calls fail at once, on every rank, and say what to do."""
    answers = four.ask(members, "call", **posed(name, SMALL, "serial"))
    for rank, answer in answers.items():
        assert answer.get("error") == "EngineError", (rank, answer)
        assert "reset() on every rank" in answer["text"]
        assert answer["seconds"] < 0.5


def healed(four: Ranks, members: Sequence[int], name: str) -> None:
    """Reset the group and hold that it works."""
    four.good(members, "reset", name=name)
    for schedule in ("hetero_fused_1d", "gated_1d"):
        four.right(members, posed(name, SMALL, schedule, times=3))


@pytest.fixture
def three(four: Ranks, request: pytest.FixtureRequest):
    """A group of ranks 0, 1, 2, open with a short timeout, which a test's parameter may set."""
    four.good(range(3), "open", name="0-1-2", timeout_s=getattr(request, "param", 0.8))
    yield four
    four.good(range(3), "close", name="0-1-2")


@pytest.fixture
def patient(four: Ranks):
    """The same, open with a timeout that no test waits for."""
    four.good(range(3), "open", name="0-1-2", timeout_s=LONG_S)
    yield four
    four.good(range(3), "close", name="0-1-2")


def open_call(times: int = MANY, problem: Any = SMALL, **words: Any) -> dict[str, Any]:
    return posed("0-1-2", problem, "hetero_fused_1d", times=times, **words)


@pytest.mark.parametrize("three", [2.5], indirect=True)  # a busy machine may run no call for 1 s
@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_rank_is_named(three: Ranks, victim: int) -> None:
    others = sorted({0, 1, 2} - {victim})
    three.right(range(3), open_call(times=2))  # else a slow machine stops it where windows grow
    for rank in range(3):
        three.all[rank].send("call", **open_call())
    time.sleep(0.2)
    try:
        stopped(three.all[victim].pid)
        answers = {rank: three.all[rank].receive(10) for rank in others}
    finally:
        three.all[victim].signal(signal.SIGCONT)
    for answer in answers.values():
        assert answer["error"] == "TimeoutExceeded", answer
        assert (
            f"Rank {victim} (pid {three.all[victim].pid}) has not been seen for" in (answer["text"])
        )
        assert "it has died or is stopped" in answer["text"]
    assert len({answer["text"].split(".")[0] for answer in answers.values()}) == 1  # one failure
    late = three.all[victim].receive(10)  # it wakes up and finds the group failed
    assert late["error"] in ("TimeoutExceeded", "EngineError"), late
    refused(three, range(3), "0-1-2")
    healed(three, range(3), "0-1-2")


@pytest.mark.parametrize("grown", [True, False])
def test_a_late_rank_is_named(three: Ranks, grown: bool) -> None:
    """It does not come to a call, or to the rendezvous before it that grows the windows."""
    if grown:
        three.right(range(3), open_call(times=2))
    for rank in (0, 1):
        three.all[rank].send("call", **open_call(times=1))
    three.all[2].send("sleep", 1.5)
    three.all[2].send("call", **open_call(times=1))
    for rank in (0, 1):
        answer = three.all[rank].receive(10)
        assert answer["error"] == "TimeoutExceeded", answer
        assert answer["seconds"] < 2.5
        if grown:
            assert "signal " in answer["text"]
            assert "Rank 2 runs, but has begun 2 calls and rank" in answer["text"], answer
        else:
            assert "rank 2 did not arrive" in answer["text"]
            assert "grow the windows" in answer["text"]
    three.all[2].receive(10)
    late = three.all[2].receive(10)
    assert late["error"] == "EngineError", late
    assert late["seconds"] < 0.5
    refused(three, range(3), "0-1-2")
    healed(three, range(3), "0-1-2")


@pytest.mark.parametrize("leader", [True, False])
def test_a_rank_that_is_not_there_to_reset_is_named(three: Ranks, leader: bool) -> None:
    absent = 0 if leader else 1
    others = sorted({0, 1, 2} - {absent})
    answers = three.ask(others, "reset", name="0-1-2")
    for answer in answers.values():
        assert answer["error"] == "TimeoutExceeded", answer
        assert f"rank {absent} did not arrive" in answer["text"], answer
    healed(three, range(3), "0-1-2")  # what was left of that rendezvous does no harm


@pytest.mark.parametrize("alone", [0, 2])
@pytest.mark.parametrize("meets", ["to grow", "to agree"])
def test_a_rank_that_meets_while_others_call_is_named_soon(
    patient: Ranks, alone: int, meets: str
) -> None:
    """A call that needs larger windows or an agreement first; the others begin a call at once."""
    patient.right(range(3), open_call(times=2, problem=gathering(3, 100, 20, 60)))
    others = sorted({0, 1, 2} - {alone})
    for rank in others:
        patient.all[rank].send("call", **open_call(times=1))
    theirs, own = "runs all_gather_matmul of 60x20x40, ", f"Rank {alone} runs something by auto."
    if meets == "to grow":
        own = f"Rank {alone} runs all_gather_matmul of 2000x20x60, "
        larger = posed("0-1-2", gathering(3, 2000, 20, 60), "hetero_fused_1d")
        patient.all[alone].send("call", **larger)
    else:
        patient.all[alone].send("agree", name="0-1-2", call=own)
    for rank in range(3):
        answer = patient.all[rank].receive(10)
        assert answer["error"] == "EngineError", answer
        assert answer["seconds"] < LONG_S / 4, answer
        assert own in answer["text"] and theirs in answer["text"], answer
        known = f"rank {alone} runs another call than rank "
        if rank != alone:
            known = f"rank {alone} does not make the call that other ranks make: "
        assert answer["text"].startswith(known), answer
    refused(patient, range(3), "0-1-2")
    healed(patient, range(3), "0-1-2")


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_rank_that_is_late_is_not_taken_for_one_that_calls(patient: Ranks, late: int) -> None:
    """Ranks that have met go on to the next call while another one still leaves the meeting."""
    for rank in range(3):
        if rank == late:
            patient.all[rank].send("sleep", 0.3)
        for at in range(20):
            problem = gathering(3, 3 * (at + 1) ** 2, 20, 40)  # the windows grow again and again
            call = posed("0-1-2", problem, "hetero_fused_1d")
            patient.all[rank].send("agree", name="0-1-2", call=f"Rank {rank} runs {at}.")
            patient.all[rank].send("call", **call)
    for rank in range(3):
        for _ in range(40 + (rank == late)):
            answer = patient.all[rank].receive(20)
            assert "error" not in answer, answer


@pytest.mark.parametrize("other", ["schedule", "operator"])
def test_a_rank_that_makes_another_call_is_named_soon(patient: Ranks, other: str) -> None:
    patient.right(range(3), open_call(times=2, problem=gathering(3, 100, 20, 60)))
    problem = gathering(3, 59, 20, 40) if other == "operator" else SMALL
    schedule = "hetero_unfused_1d" if other == "schedule" else "hetero_fused_1d"
    for rank in (0, 1):
        patient.all[rank].send("call", **open_call(times=1))
    patient.all[2].send("call", **posed("0-1-2", problem, schedule))
    for rank in range(3):
        answer = patient.all[rank].receive(10)
        assert answer["error"] == "EngineError", answer
        assert answer["seconds"] < LONG_S / 4, answer
        assert "rank 2 runs another call than rank " in answer["text"], answer
        assert "pass rows= if shards are uneven" in answer["text"], answer
        mine = problem if rank == 2 else SMALL
        assert f"Rank {rank} runs all_gather_matmul of {mine.m}x20x40, rows " in answer["text"] or (
            rank == 1 and "than rank 0" in answer["text"]
        ), answer
    refused(patient, range(3), "0-1-2")
    healed(patient, range(3), "0-1-2")


@pytest.mark.parametrize("other", ["topk", "experts"])
@pytest.mark.parametrize("op", EXPERTS)
def test_a_rank_with_other_experts_is_named_soon(patient: Ranks, op: str, other: str) -> None:
    usual = Problem.chunked(op, 3, 60, 20, 40)
    schedule = EXPERTS[op]
    different = replace(usual, **{other: 3})
    for problem in (different, usual):  # no windows grow later
        patient.right(range(3), posed("0-1-2", problem, schedule, times=2))
    for rank in range(3):
        problem = different if rank == 2 else usual
        patient.all[rank].send("call", **posed("0-1-2", problem, schedule))
    for rank in range(3):
        answer = patient.all[rank].receive(10)
        assert answer["error"] == "EngineError", answer
        assert answer["seconds"] < LONG_S / 4, answer
        assert "rank 2 runs another call than rank " in answer["text"], answer
        assert f"Rank 2 runs {op} of " in answer["text"], answer
    refused(patient, range(3), "0-1-2")
    healed(patient, range(3), "0-1-2")


def test_different_calls_that_grow_are_told_apart(three: Ranks) -> None:
    for rank in range(3):
        problem = gathering(3, 300 + (rank == 1), 20, 60)
        three.all[rank].send("call", **posed("0-1-2", problem, "serial"))
    for rank in range(3):
        answer = three.all[rank].receive(10)
        assert answer["error"] == "EngineError", answer
        assert answer["text"].startswith("rank 1 runs another call than rank 0. Rank 0 runs all_g")
        assert "of 300x20x60, rows " in answer["text"] and "301x20x60" in answer["text"], answer
        assert "pass rows= if" in answer["text"] and "reset() on every" in answer["text"], answer
    for answer in three.ask(range(3), "call", **posed("0-1-2", SMALL, "serial")).values():
        assert "It was: rank 1 runs another call than rank 0. Rank 0" in answer["text"], answer
    healed(three, range(3), "0-1-2")


def test_an_error_of_one_rank_stops_all(three: Ranks) -> None:
    three.right(range(3), open_call(times=2))
    for rank in range(3):
        three.all[rank].send("call", **open_call(times=1, fill_nan=rank == 1))
    answers = [three.all[rank].receive(10) for rank in range(3)]
    assert "rank 1 failed" in answers[1]["text"], answers
    for rank in (0, 2):  # unless rank 1 had sent all that they needed of it
        if "error" in answers[rank]:
            assert answers[rank]["error"] == "EngineError"
            assert "rank 1 stopped" in answers[rank]["text"]
            assert answers[rank]["seconds"] < 0.7
        else:
            assert not answers[rank]["value"]["wrong"], answers[rank]
    refused(three, range(3), "0-1-2")
    healed(three, range(3), "0-1-2")


def test_memory_that_cannot_be_had_changes_nothing(three: Ranks) -> None:
    three.right(range(3), open_call(times=3))
    before = three.good(range(3), "state", name="0-1-2")
    answers = three.ask(range(3), "grow", name="0-1-2", window_bytes=1 << 44)
    for answer in answers.values():
        assert answer["error"] == "MemoryError", answer
        assert str(1 << 44) in answer["text"], answer
    assert three.good(range(3), "state", name="0-1-2") == before
    three.right(range(3), open_call(times=3))


def test_a_rank_that_closed_is_named(four: Ranks) -> None:
    four.good(range(3), "open", name="0-1-2", timeout_s=0.5)
    four.right(range(3), open_call(times=2))
    four.good([1], "close", name="0-1-2")
    for answer in four.ask([0, 2], "call", **open_call(times=2)).values():
        assert answer["error"] == "TimeoutExceeded", answer
        assert "has closed its runtime" in answer["text"]
    for answer in four.ask([0, 2], "reset", name="0-1-2").values():
        assert answer["error"] == "EngineError", answer
        assert "rank 1 (pid" in answer["text"]
    four.good([0, 2], "close", name="0-1-2")


def kill_one(ranks: Ranks, members: list[int], chance: random.Random) -> int:
    """Kill a member at a random moment of many calls; return the number of its process."""
    name = "-".join(map(str, range(len(members))))
    before = ranks.good(members, "state", name=name)
    paced = chance.choice([0, 0.5])
    timeout_s = 1.5
    opened = ranks.good(members, "open", name=name, timeout_s=timeout_s, gbps=paced)
    victim = chance.choice(members)
    rank_of = {number: rank for number, (rank, _) in opened.items()}
    problem = Problem.chunked(chance.choice([*EXPERTS, *GATHERS]), 3, 90, 30, 40)
    schedule = EXPERTS.get(problem.op) or chance.choice(
        ["serial", "hetero_fused_1d", "uniform_fused_2d", "gated_1d"]
    )
    # Windows grow at the first call, so early deaths are deaths in a rendezvous.
    for number in members:
        ranks.all[number].send("call", **posed(name, problem, schedule, times=MANY))
    time.sleep(chance.choice([0, 0.005, 0.02, 0.1]) * 2 * chance.random())
    ranks.all[victim].kill()
    died = time.monotonic()
    for number in members:
        if number == victim:
            continue
        answer = ranks.all[number].receive(30)
        about = f"victim {rank_of[victim]}, {problem.op}, {schedule}, paced {paced}: {answer}"
        assert time.monotonic() - died < timeout_s + 3, about
        assert answer["error"] in ("TimeoutExceeded", "EngineError"), about
        named = f"ank {rank_of[victim]} (pid {ranks.all[victim].pid}) has"
        assert named in answer["text"], about
    left = [number for number in members if number != victim]
    ranks.good(left, "close", name=name)
    after = ranks.good(left, "state", name=name)
    for number in left:
        assert after[number] == before[number]
    return victim


@pytest.mark.timeout(60 + 20 * KILLS)
def test_killed_ranks_are_named_and_the_others_go_on(torch) -> None:
    """Of three ranks one is killed; the survivors and a fresh one are the next group."""
    chance, memory = random.Random(0), shared_memory()
    done = 0
    while done < KILLS:
        batch = min(10, KILLS - done)
        with (
            tempfile.TemporaryDirectory() as folder,
            Ranks(3 + batch, Path(folder)) as ranks,
        ):
            members, fresh = [0, 1, 2], list(range(3, 3 + batch))
            for _ in range(batch):
                ranks.world(members, [[0, 1, 2]])
                victim = kill_one(ranks, members, chance)
                left = [number for number in members if number != victim]
                ranks.world(left, [[0, 1]])
                ranks.good(left, "open", name="0-1", timeout_s=20)
                ranks.right(left, posed("0-1", gathering(2, 40, 30, 20), "hetero_fused_1d"))
                ranks.good(left, "close", name="0-1")
                members = [*left, fresh.pop(0)]
                done += 1
    assert shared_memory() == memory
