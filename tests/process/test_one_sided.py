"""What one rank alone does: it raises an error, resets, leaves, forks; its peers are told soon."""

from __future__ import annotations

import copy
import os
import signal
import time
from typing import Any

import pytest
from ranks import Ranks

NAME = "0-1-2"
LONG_S = 40.0  # a timeout that nobody waits for
SOON_S = 15.0  # a second or so, on a machine that does much else
ABSENT = "rank 1 does not make the call that other ranks make"
REFUSED = f"{ABSENT}: InputError: w is torch.float64"


@pytest.fixture
def three(four: Ranks):
    """A group of ranks 0, 1, 2 that its first call opens."""
    yield four
    four.good(range(3), "close_functions", NAME)


@pytest.fixture
def patient(three: Ranks):
    """The same, open with a timeout that nobody waits for."""
    three.good(range(3), "prepare", NAME, LONG_S)
    assert all(three.good(range(3), "function", NAME).values())
    return three


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory):
    """Hands out processes that no test has used, three at a time, as ranks of a group."""
    pytest.importorskip("torch")
    with Ranks(33, tmp_path_factory.mktemp("fresh")) as ranks:
        free = iter(range(33))

        def three() -> Ranks:
            numbers = [next(free) for _ in range(3)]
            ranks.world(numbers, [[0, 1, 2]])
            chosen = copy.copy(ranks)
            chosen.all = [ranks.all[number] for number in numbers]
            return chosen

        yield three


def call(ranks: Ranks, members: Any, **words: Any) -> None:
    for rank in members:
        ranks.all[rank].send("function", NAME, **words)


def told(ranks: Ranks, members: Any, *words: str) -> None:
    """Hold that calls fail soon, by an error of these words."""
    begin = time.monotonic()
    for rank in members:
        answer = ranks.all[rank].receive(LONG_S)
        assert answer.get("error") in ("EngineError", "TimeoutExceeded"), answer
        for each in words:
            assert each in answer["text"], answer
    assert time.monotonic() - begin < SOON_S


def right(ranks: Ranks, times: int = 3) -> None:
    assert all(ranks.good(range(3), "function", NAME, times=times).values())


def refused(ranks: Ranks, rank: int) -> None:
    answer = ranks.all[rank].receive()
    assert answer.get("error") == "InputError" and "w is torch.float64" in answer["text"], answer


@pytest.mark.parametrize("grown", [True, False])
def test_an_error_of_one_rank_is_told_to_those_in_the_call(patient: Ranks, grown: bool) -> None:
    """They are in the call itself, or in the rendezvous before it, which makes larger windows."""
    columns = 5 if grown else 4000
    call(patient, [0, 2], columns=columns)
    call(patient, [1], columns=columns, fill_nan=True)
    refused(patient, 1)
    told(patient, [0, 2], REFUSED if grown else "rank", "reset() on every rank")
    call(patient, [1])
    told(patient, [1], "an earlier call on this group failed", "reset() on every rank")
    patient.good(range(3), "reset_functions", NAME)
    right(patient)


def test_an_error_in_a_backward_is_told(patient: Ranks) -> None:
    patient.good(range(3), "gradient", NAME)
    for rank in range(3):
        patient.all[rank].send("gradient", NAME, second=rank == 1)
    answer = patient.all[1].receive()
    assert answer.get("error") == "InputError" and "create_graph" in answer["text"], answer
    told(patient, [0, 2], f"{ABSENT}: InputError: all_gather")
    patient.good(range(3), "reset_functions", NAME)
    right(patient)


def test_an_error_that_all_ranks_share_needs_no_reset(patient: Ranks) -> None:
    for _ in range(3):
        call(patient, range(3), fill_nan=True)
        for rank in range(3):
            refused(patient, rank)
        right(patient, 1)


@pytest.mark.parametrize("shared", [1, 6])
def test_an_error_of_one_rank_behind_those_that_all_ranks_share(
    patient: Ranks, shared: int
) -> None:
    for _ in range(shared):
        call(patient, range(3), fill_nan=True)
        for rank in range(3):
            refused(patient, rank)
    call(patient, [0, 2])
    call(patient, [1], schedule="fastest")
    answer = patient.all[1].receive()
    assert answer.get("error") == "ScheduleError" and "'fastest'" in answer["text"], answer
    told(patient, [0, 2], f"{ABSENT}: ScheduleError: unknown schedule 'fastest'")
    patient.good(range(3), "reset_functions", NAME)
    right(patient)


def test_an_error_that_keeps_nobody_waiting_is_told_to_nobody(patient: Ranks) -> None:
    for _ in range(2):
        call(patient, [1], fill_nan=True)
        refused(patient, 1)
        right(patient)


def test_an_error_of_one_rank_at_the_first_call_is_told(three: Ranks) -> None:
    call(three, [0, 2])
    call(three, [1], fill_nan=True)
    refused(three, 1)
    told(three, [0, 2], "rank 1 cannot open the group because of an error", "w is torch.float64")
    right(three)


def test_an_error_that_all_ranks_share_at_the_first_call(three: Ranks) -> None:
    call(three, range(3), fill_nan=True)
    for rank in range(3):
        refused(three, rank)
    right(three)


def test_a_reset_of_one_rank_is_told_to_those_in_a_call(patient: Ranks) -> None:
    call(patient, [0, 2])
    patient.all[1].send("reset_functions", NAME)
    told(patient, [0, 2], f"{ABSENT}: it called reset()")
    time.sleep(1.0)  # it waits for them
    for rank in (0, 2):
        patient.all[rank].send("reset_functions", NAME)
    for rank in range(3):
        answer = patient.all[rank].receive()
        assert "error" not in answer, answer
    right(patient)


@pytest.mark.parametrize("way", ["close_functions", "leave", "kill"])
@pytest.mark.parametrize("early", [True, False])
def test_a_rank_that_has_left_is_told_of(fresh: Any, way: str, early: bool) -> None:
    """It leaves while the others wait in a call, or before they make it."""
    ranks = fresh()
    ranks.good(range(3), "prepare", NAME, LONG_S)
    right(ranks)
    if not early:
        call(ranks, [0, 2])
        time.sleep(0.5)
    if way == "kill":
        ranks.all[1].kill()
    else:
        ranks.all[1].send(way, *([NAME] if way == "close_functions" else []))
    if early:
        time.sleep(0.5)
        call(ranks, [0, 2])
    cause = "has died" if way == "kill" else "has closed its runtime"
    told(ranks, [0, 2], f"Rank 1 (pid {ranks.all[1].pid}) {cause}", "Restart the processes")
    call(ranks, [0])
    answer = ranks.all[0].receive()
    assert "increase it if the machine is slow" not in answer["text"], answer


def test_what_ends_in_order_is_no_failure(fresh: Any) -> None:
    """Ranks close one after another, each when its last call has ended."""
    ranks = fresh()
    ranks.good(range(3), "prepare", NAME, LONG_S)
    for rank in range(3):
        ranks.all[rank].send("function", NAME, times=200)
        ranks.all[rank].send("close_functions", NAME)
    for rank in range(3):
        for _ in range(2):
            answer = ranks.all[rank].receive()
            assert "error" not in answer, answer


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_the_group_opens(fresh: Any, victim: int) -> None:
    ranks = fresh()
    other = 1 - victim
    for rank in (0, 1):  # rank 2 does not come
        ranks.all[rank].send("prepare", NAME, LONG_S)
    time.sleep(1.0)
    ranks.all[victim].kill()
    told(ranks, [other], f"rank {victim} (pid {ranks.all[victim].pid}) has died", "Restart")


class TestForks:
    def test_a_child_is_refused_and_its_parent_stays_right(self, patient: Ranks) -> None:
        for _ in range(5):
            for rank in range(3):
                patient.all[rank].send("function_in_a_child", NAME)
            for rank in range(3):
                said = patient.all[rank].receive()["value"]
                assert said.count("EngineError: this process was forked from one that uses") == 2
                assert "spawn" in said
            right(patient, 20)

    def test_a_child_that_would_measure_the_machine_is_refused_at_once(self, fresh: Any) -> None:
        """The first call of a group does so, together with the other ranks."""
        ranks = fresh()
        ranks.good(range(3), "prepare", NAME, LONG_S)
        begin = time.monotonic()
        said = ranks.good([1], "function_in_a_child", NAME, measured=True)[1]
        assert said.count("EngineError: this process was forked from one that uses") == 2, said
        assert time.monotonic() - begin < 5
        right(ranks)

    def test_a_child_does_not_hide_that_its_parent_has_died(self, fresh: Any) -> None:
        """As the workers of a DataLoader do, it outlives the rank for some time."""
        ranks = fresh()
        ranks.good(range(3), "prepare", NAME, LONG_S)
        right(ranks)
        child = ranks.good([1], "leave_a_child")[1]
        right(ranks)
        ranks.all[1].kill()
        try:
            for rank in (0, 2):
                ranks.all[rank].send("reset_functions", NAME)
            told(ranks, [0, 2], "rank 1 (pid", "has left the group")
        finally:
            os.kill(child, signal.SIGKILL)
