"""Signals that reach a rank in a call: Ctrl-C ends the call at once, other handlers run in it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence

import pytest
from ranks import Rank, Ranks

NAME = "0-1"
LONG_S = 40.0  # a timeout that nobody waits for
SOON_S = 15.0  # a second or so, on a machine that does much else


@pytest.fixture
def two(four: Ranks) -> Iterator[Ranks]:
    """A group of two ranks that is open, with a timeout that nobody waits for."""
    four.good(range(2), "prepare", NAME, LONG_S)
    four.good(range(2), "handle", NAME)
    assert all(four.good(range(2), "function", NAME, schedule="shard_p2p").values())
    yield four
    four.good(range(2), "close_functions", NAME)


def call(rank: Rank, grown: bool, announced: bool = False) -> None:
    inner = 3 if grown else 4000
    rank.send("function", NAME, inner=inner, schedule="shard_p2p", announced=announced)


def wait_in_a_call(ranks: Ranks, grown: bool) -> None:
    """Let rank 0 wait for rank 1: in the call, or before it, in the rendezvous for windows."""
    known = len(said(ranks))
    call(ranks.all[0], grown, announced=True)
    wait_for_lines(ranks, known, ["begins"])
    time.sleep(0.2)  # from the announcement to the wait takes a few ms


def said(ranks: Ranks) -> list[str]:
    """Return the lines that rank 0 has written to stderr."""
    return ranks.all[0].said.read_text().splitlines()


def wait_for_lines(ranks: Ranks, known: int, starts: Sequence[str]) -> None:
    """Wait until rank 0 has written lines that start so, behind those that are known."""
    deadline = time.monotonic() + SOON_S
    while len(said(ranks)) < known + len(starts) and time.monotonic() < deadline:
        time.sleep(0.01)
    lines = said(ranks)[known:]
    assert len(lines) == len(starts), lines
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True)), lines


def interrupted(ranks: Ranks, error: str) -> None:
    """Hold that the call of rank 0 ends by an interrupt, and that a reset helps."""
    begin = time.monotonic()
    answer = ranks.all[0].receive(LONG_S)
    assert answer.get("error") == error, answer
    assert time.monotonic() - begin < SOON_S
    ranks.good(range(2), "reset_functions", NAME)
    right(ranks)


def right(ranks: Ranks) -> None:
    assert all(ranks.good(range(2), "function", NAME, schedule="shard_p2p", times=3).values())


@pytest.mark.parametrize("grown", [True, False])
@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGALRM, "Alarm")]
)
def test_an_exception_of_a_handler_ends_a_call_that_waits(
    two: Ranks, grown: bool, number: int, error: str
) -> None:
    """It is raised as it is."""
    wait_in_a_call(two, grown)
    two.all[0].signal(number)
    interrupted(two, error)


def test_ctrl_c_as_a_call_starts(two: Ranks) -> None:
    two.all[1].send("function", NAME, inner=7, schedule="shard_p2p")
    two.all[0].send("interrupted_start", NAME)
    answer = two.all[1].receive(LONG_S)
    assert answer.get("error") == "EngineError", answer
    assert "rank 0 stopped. The error on rank 0 says why. Call" in answer["text"], answer
    interrupted(two, "KeyboardInterrupt")


def test_an_exception_of_a_handler_ends_measurements(two: Ranks) -> None:
    """They turn other exceptions into a warning."""
    two.all[0].send("tuned", NAME, alarm_s=0.1)
    two.all[1].send("tuned", NAME)
    answer = two.all[1].receive(LONG_S)
    assert answer.get("error") in ("EngineError", "TimeoutExceeded") or answer["value"], answer
    interrupted(two, "Alarm")


@pytest.mark.parametrize("grown", [True, False])
def test_a_call_by_the_handler_of_a_signal_is_refused(two: Ranks, grown: bool) -> None:
    """The call that it came into goes on, and is right."""
    wait_in_a_call(two, grown)
    known = len(said(two))
    two.all[0].signal(signal.SIGUSR1)
    wait_for_lines(two, known, ["EngineError: a call of ficco began inside another call"] * 2)
    call(two.all[1], grown)
    assert [two.all[rank].receive(LONG_S).get("value") for rank in range(2)] == [True, True]
    right(two)
