"""One rank of three does something at a random moment; the others are told, and all go on.

FICCO_CHAOS=200 python -m pytest tests/process/test_chaos.py is the long run; FICCO_CHAOS_SEED
draws other moments.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ranks import Ranks

ROUNDS = int(os.environ.get("FICCO_CHAOS", "12"))
SEED = int(os.environ.get("FICCO_CHAOS_SEED", "0"))
NAME = "0-1-2"
TIMEOUT_S = 4.0
TOLD_S = 20.0  # by when whoever is in a call is told, on a machine that does much else
MANY = 1_000_000  # calls: for longer than any test
LEAVING = ("kill", "leave", "close")  # behind which the others need a new group
STAYING = ("stop", "interrupt", "raise", "reset", "diverge")


@pytest.fixture(scope="module")
def trios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Hands out processes; those that live on are used again."""
    pytest.importorskip("torch")
    with Ranks(3 + ROUNDS, tmp_path_factory.mktemp("chaos")) as ranks:
        yield ranks


def begin(ranks: Ranks, number: int, event: str, chance: random.Random) -> None:
    """Have a victim do its part, behind some calls that it makes with the others."""
    rank = ranks.all[number]
    if event not in ("kill", "stop"):
        rank.send("function", NAME, times=chance.choice([0, 1, 2, 5, 40]))
    if event == "leave":
        rank.send("leave")
    elif event == "close":
        rank.send("close_functions", NAME)
    elif event == "interrupt":
        rank.send("interrupted", NAME, after_s=1e-3 + 0.02 * chance.random())
    elif event == "raise":
        rank.send("function", NAME, fill_nan=True)
    elif event == "reset":
        rank.send("reset_functions", NAME)
    elif event == "diverge":
        rank.send("function", NAME, inner=2)
    else:
        rank.send("function", NAME, times=MANY)
        time.sleep(chance.choice([0.0, 0.002, 0.02, 0.2]) * chance.random())
        rank.signal(signal.SIGKILL if event == "kill" else signal.SIGSTOP)


def others_are_told(ranks: Ranks, others: list[int], about: str) -> None:
    for number in others:
        answer = ranks.all[number].receive(TOLD_S)
        assert answer.get("error") in ("EngineError", "TimeoutExceeded"), f"{about}: {answer}"
        assert answer["seconds"] < TOLD_S, f"{about}: {answer}"


def ends_its_part(ranks: Ranks, number: int, event: str, about: str) -> None:
    """Hold what a victim that stays is answered."""
    rank = ranks.all[number]
    if event == "stop":
        rank.signal(signal.SIGCONT)
    else:
        assert rank.receive(TOLD_S).get("value") is True, about  # the calls before
    if event != "reset":
        answer = rank.receive(TOLD_S)
        wanted = {"raise": ["InputError"], "interrupt": ["Alarm"]}.get(
            event, ["EngineError", "TimeoutExceeded"]
        )
        assert answer.get("error") in wanted, f"{about}: {answer}"


def reset(ranks: Ranks, members: list[int], at_it: list[int], about: str) -> None:
    """Reset the group on all ranks, of which some are at it already."""
    for number in members:
        if number not in at_it:
            ranks.all[number].send("reset_functions", NAME)
    for number in members:
        answer = ranks.all[number].receive(TOLD_S)
        assert "error" not in answer, f"{about}: {answer}"


@pytest.mark.timeout(120 + 30 * ROUNDS)
def test_whatever_one_rank_does_the_others_are_told_and_go_on(trios: Ranks) -> None:
    chance, ranks, free = random.Random(SEED), trios, iter(range(3, 3 + ROUNDS))
    events = [*LEAVING, *STAYING]
    members = [0, 1, 2]
    ranks.world(members, [[0, 1, 2]])
    ranks.good(members, "prepare", NAME, TIMEOUT_S)
    for turn in range(ROUNDS):
        event = events[turn % len(events)]
        victim = chance.choice(members)
        others = [number for number in members if number != victim]
        about = f"round {turn}: rank {members.index(victim)} does {event!r}"
        assert all(ranks.good(members, "function", NAME, times=2).values()), about
        for number in others:
            ranks.all[number].send("function", NAME, times=MANY)
        begin(ranks, victim, event, chance)
        others_are_told(ranks, others, about)
        if event in STAYING:
            ends_its_part(ranks, victim, event, about)
            reset(ranks, members, [victim] if event == "reset" else [], about)
            continue
        ranks.good(others, "close_functions", NAME)
        members = [*others, next(free)]
        ranks.world(members, [[0, 1, 2]])
        ranks.good(members, "prepare", NAME, TIMEOUT_S)
    assert all(ranks.good(members, "function", NAME, times=5).values())
