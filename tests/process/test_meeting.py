"""How ranks find each other and agree, without torch: threads of this process stand for ranks."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ficco.errors import EngineError, TimeoutExceeded
from ficco.machine import Machine
from ficco.runtime import connecting
from ficco.runtime.connecting import Members
from ficco.runtime.meeting import Agenda, Meeting

WORLD = 3
HOST = Machine.named("host")


class Gathering:
    """What an all-gather of torch.distributed does, between threads."""

    def __init__(self, change: Callable[[int, Any], Any] = lambda rank, mine: mine) -> None:
        self._barrier = threading.Barrier(WORLD, timeout=10)
        self._entries: list[Any] = [None] * WORLD
        self._change = change

    def members(self, rank: int) -> Members:
        def gather(mine: Any) -> list[Any]:
            self._entries[rank] = self._change(rank, mine)
            self._barrier.wait()
            return list(self._entries)

        return Members(rank, WORLD, gather)


def together(body: Callable[[int], Any], ranks: range = range(WORLD)) -> dict[int, Any]:
    """Run a body per rank at once; return what each returned or raised."""
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = body(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(found) == set(ranks)
    return found


def opened(gathering: Gathering, timeout_s: float = 5) -> list[Any]:
    found = together(lambda rank: Meeting(gathering.members(rank), {}, timeout_s))
    return [found[rank] for rank in range(WORLD)]


def agenda(rank: int, what: str = "meet", **changes: Any) -> Agenda:
    """An agenda whose memory is an empty file, and whose result is the size that was agreed."""

    def join(memory: int, facts: dict[str, Any]) -> int:
        os.fstat(memory)
        return int(facts["most"])

    plain = Agenda(
        what,
        {"mine": rank * 10},
        lambda brought: (os.memfd_create("t"), {"most": max(f["mine"] for f in brought)}),
        join,
        lambda: None,
        lambda rank: "",
    )
    return plain._replace(**changes)


@pytest.fixture
def meetings():
    before = _files()
    found = opened(Gathering())
    yield found
    for meeting in found:
        meeting.close()
    assert _files() == before


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


class TestConnecting:
    def refusal(self, change: Callable[[int, Any], Any]) -> list[Any]:
        before = _files()
        errors = opened(Gathering(change), timeout_s=0.5)
        assert _files() == before
        return errors

    def test_other_hosts_are_refused(self) -> None:
        def elsewhere(rank: int, mine: Any) -> Any:
            return {**mine, "host": ["there", "1"]} if rank == 2 else mine

        for error in self.refusal(elsewhere):
            assert isinstance(error, EngineError)
            assert "rank 2 on 'there'" in str(error)

    def test_other_facts_are_refused(self) -> None:
        def otherwise(rank: int, mine: Any) -> Any:
            return {**mine, "facts": {"machine": "mesh4"}} if rank == 1 else mine

        for error in self.refusal(otherwise):
            assert isinstance(error, EngineError)
            assert "rank 1 for {'machine': 'mesh4'}" in str(error)

    def test_strangers_are_not_let_in(self) -> None:
        """One that says nothing, one that guesses; the ranks connect all the same."""
        strangers = []

        def disturbed(rank: int, mine: Any) -> Any:
            if mine["address"]:
                for words in (b"", b"[]", b'{"rank": 1, "secret": "x"}', b'{"rank": 9}', b"\xff"):
                    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    stranger.connect(bytes.fromhex(mine["address"]))
                    if words:
                        stranger.send(words)
                    strangers.append(stranger)
            return mine

        found = opened(Gathering(disturbed))
        results = together(lambda rank: found[rank].meet(agenda(rank), 5))
        assert results == {0: 20, 1: 20, 2: 20}
        for each in (*found, *strangers):
            each.close()

    def test_another_user_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connecting.os, "geteuid", lambda: os.getuid() + 1)
        errors = opened(Gathering(), timeout_s=0.3)
        assert isinstance(errors[0], TimeoutExceeded)
        assert "the connection of rank 1 (pid" in str(errors[0])
        assert all("belongs to user" in str(error) for error in errors[1:])


class TestMeeting:
    def test_all_get_what_was_agreed_again_and_again(self, meetings: list[Meeting]) -> None:
        for _ in range(20):
            assert set(together(lambda rank: meetings[rank].meet(agenda(rank), 5)).values()) == {20}

    def test_who_does_not_come_is_named(self, meetings: list[Meeting]) -> None:
        def late(rank: int) -> str:
            return f"Rank {rank} sleeps."

        for absent, there in ((2, range(2)), (0, range(1, 3))):
            found = together(
                lambda rank: meetings[rank].meet(agenda(rank, condition=late), 0.2), there
            )
            for error in found.values():
                assert isinstance(error, TimeoutExceeded)
                assert f"rank {absent} did not come within" in str(error)
                assert f"Rank {absent} sleeps." in str(error)
            # A late comer is not mixed up with the next meeting.
            assert set(together(lambda rank: meetings[rank].meet(agenda(rank), 5)).values()) == {20}

    def test_other_purposes_are_told_apart(self, meetings: list[Meeting]) -> None:
        found = together(
            lambda rank: meetings[rank].meet(agenda(rank, "grow" if rank else "reset"), 5)
        )
        for error in found.values():
            assert isinstance(error, EngineError)
            assert "rank 1 came to grow, rank 0 to reset" in str(error)

    @pytest.mark.parametrize("rank", range(WORLD))
    def test_memory_that_one_cannot_have_none_has(self, meetings: list[Any], rank: int) -> None:
        def no_room(memory: int, facts: dict[str, Any]) -> Any:
            raise MemoryError("4096 bytes cannot be had")

        def meet(each: int) -> Any:
            plain = agenda(each)
            return meetings[each].meet(plain._replace(join=no_room) if each == rank else plain, 5)

        for error in together(meet).values():
            assert isinstance(error, MemoryError)
            assert "4096 bytes" in str(error)
        assert set(together(lambda each: meetings[each].meet(agenda(each), 5)).values()) == {20}

    @pytest.mark.parametrize("gone", range(WORLD))
    def test_who_has_left_is_named_now_and_later(self, meetings: list[Any], gone: int) -> None:
        meetings[gone].close()
        others = sorted(set(range(WORLD)) - {gone})
        for _ in range(2):
            begin = time.monotonic()
            for rank in others:  # one after the other: who comes late is told, too
                with pytest.raises(EngineError, match=rf"rank {gone} \(pid \d+\) has left"):
                    meetings[rank].meet(agenda(rank), 5)
            assert time.monotonic() - begin < 2

    def test_a_broken_group_ends_the_wait(self, meetings: list[Any]) -> None:
        broken = EngineError("it failed")
        begin = time.monotonic()
        for rank in range(2):
            with pytest.raises(EngineError, match="it failed"):
                meetings[rank].meet(agenda(rank, broken=lambda: broken), 30)
        assert time.monotonic() - begin < 2
        assert set(together(lambda rank: meetings[rank].meet(agenda(rank), 5)).values()) == {20}
