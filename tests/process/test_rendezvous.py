"""How ranks find each other and agree, without torch: threads of this process stand for ranks."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

import ficco
from ficco.core import logs
from ficco.core.errors import EngineError, SeveralNodes, TimeoutExceeded
from ficco.core.presence import facts_of_process
from ficco.core.settings import equal_variables
from ficco.runtime import bootstrap
from ficco.runtime.bootstrap import Members, note_refusal
from ficco.runtime.meeting import Agenda
from ficco.runtime.object_exchange import gathered_objects
from ficco.runtime.rendezvous import Rendezvous

WORLD = 3


class Kept:
    """A store of torch.distributed, for threads. `change` is given what a rank leaves there."""

    def __init__(self, change: Callable[[str, Any], Any] = lambda key, value: value) -> None:
        self._kept: dict[str, str] = {}
        self._change = change

    def set(self, key: str, value: str) -> None:
        self._kept[key] = json.dumps(self._change(key, json.loads(value)))

    def get(self, key: str) -> bytes:
        return self._kept[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._kept for key in keys)

    def members(self, rank: int) -> Members:
        return Members(rank, WORLD, "the CPU", self)


def together(body: Callable[[int], Any], ranks: Iterable[int] = range(WORLD)) -> dict[int, Any]:
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


def opened(store: Kept, timeout_s: float = 20, ranks: Iterable[int] = range(WORLD)) -> list[Any]:
    found = together(lambda rank: Rendezvous(store.members(rank), {}, timeout_s), ranks)
    return [found[rank] for rank in ranks]


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
def rendezvous():
    before = _files()
    found = opened(Kept())
    yield found
    for rendezvous in found:
        rendezvous.close()
    assert _files() == before


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def closed(ranks: Iterable[Any]) -> None:
    for rank in ranks:
        rank.close()


class TestConnecting:
    @pytest.fixture(autouse=True)
    def _leaves_nothing_open(self):
        before = _files()
        yield
        assert _files() == before

    def test_ranks_on_another_node_are_told_to_all(self) -> None:
        own = {"version": ficco.__version__, "variables": equal_variables(), "turn": 0}
        store = Kept()
        store.set("ficco/rank/2", json.dumps({**_came(), **own, "node": ["there", "1", "2"]}))
        for error in opened(store, 20, [0, 1]):
            assert isinstance(error, SeveralNodes)
            assert "'there': ranks [2]" in str(error)

    def test_rank_0_on_another_node_is_told_to_all(self) -> None:
        def elsewhere(key: str, value: Any) -> Any:
            there = key in ("ficco/leader", "ficco/rank/0")
            return {**value, "node": ["there", "1", "2"]} if there else value

        for error in opened(Kept(elsewhere), 20):
            assert isinstance(error, SeveralNodes)
            assert "'there': ranks [0]" in str(error)

    @pytest.mark.parametrize("rank", range(WORLD))
    def test_an_interrupt_of_a_rank_ends_the_wait_for_it(self, rank: int) -> None:
        def interrupted(key: str, value: Any) -> Any:
            if key == f"ficco/rank/{rank}":
                raise InterruptedError("time is up")
            return value

        begin = time.monotonic()
        found = opened(Kept(interrupted))
        assert time.monotonic() - begin < 5
        assert isinstance(found.pop(rank), InterruptedError)
        for error in found:
            assert f"rank {rank} cannot open the group because of an error: Interr" in str(error)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_broken_group_ends_the_wait_for_connections(self, rank: int) -> None:
        broken = EngineError("it failed")
        begin = time.monotonic()
        with pytest.raises(EngineError, match="it failed"):
            Rendezvous(Kept().members(rank), {}, 20, lambda: broken)
        assert time.monotonic() - begin < 5

    @pytest.mark.parametrize(
        ("differs", "wanted"),
        [
            ("facts", "rank 1 requests machine=mesh4"),
            ("kind", "rank 1 for GPUs"),
            ("what", "rank 1 came to make a window, rank 0 to open the group"),
            ("version", "and rank 1 has 0.0.1; install one version"),
            ("variables", "rank 0 has FICCO_BOOK='' and rank 1 has FICCO_BOOK='mine'"),
        ],
    )
    def test_what_is_not_alike_is_refused_by_all(
        self, differs: str, wanted: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A rank that comes when the others have raised the error raises it within 2 s."""
        others: Any = {"version": "0.0.1", "variables": {"FICCO_BOOK": "mine"}}
        own = threading.local()

        def facts_here() -> dict[str, Any]:
            is_other = own.rank == 1 and differs in others
            return facts_of_process() | ({differs: others[differs]} if is_other else {})

        monkeypatch.setattr(bootstrap, "facts_of_process", facts_here)
        store, raised = Kept(), threading.Barrier(WORLD)

        def meet(rank: int) -> Any:
            own.rank = rank
            members, facts = store.members(rank), {"machine": "host"}
            if rank == 1 and differs == "kind":
                members = members._replace(kind="GPUs")
            elif rank == 1 and differs == "what":
                members = members._replace(what="make a window")
            elif rank == 1 and differs == "facts":
                facts = {"machine": "mesh4"}
            if rank == 2:
                raised.wait(20)
            begin = time.monotonic()
            try:
                with pytest.raises(EngineError) as caught:
                    Rendezvous(members, facts, 20)
                assert time.monotonic() - begin < 2, rank
                return str(caught.value)
            finally:
                if rank != 2:
                    raised.wait(20)

        for rank, said in together(meet).items():
            assert wanted in said, (rank, said)

    def test_who_died_before_it_called_ficco_is_named_soon(self) -> None:
        """It had told its process before it imported ficco's modules."""
        store, begin = Kept(), time.monotonic()
        told = {1: facts_of_process() | {"born": "0"}}
        for error in together(
            lambda rank: Rendezvous(store.members(rank)._replace(announced=told.get), {}, 30),
            [0, 2],
        ).values():
            assert f"rank 1 (pid {os.getpid()}) has died, so rank" in str(error), error
        assert time.monotonic() - begin < 5

    def test_a_timeout_says_what_is_known_of_who_is_missing(self) -> None:
        members = Kept().members(0)._replace(announced={1: facts_of_process()}.get)
        with pytest.raises(TimeoutExceeded) as caught:
            Rendezvous(members, {}, 0.3)
        missing = f"rank 1 (pid {os.getpid()}) and rank 2 (it has not called ficco)"
        assert missing in str(caught.value)

    def test_a_long_wait_is_reported_with_the_missing_ranks(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(logs, "FIRST_REPORT_S", 0.1)
        for error in opened(Kept(), 0.6, [0, 1]):
            assert isinstance(error, TimeoutExceeded)
        assert "rank 0 waits for rank 2 (it has not called ficco) to open the group" in caplog.text

    def test_strangers_are_not_let_in(self) -> None:
        """One that says nothing, one that guesses; the ranks connect all the same."""
        strangers = []

        def disturbed(key: str, value: Any) -> Any:
            if key == "ficco/leader":
                for words in (b"", b"[]", b'{"rank": 1, "secret": "x"}', b'{"rank": 9}', b"\xff"):
                    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    stranger.connect(bytes.fromhex(value["address"]))
                    if words:
                        stranger.send(words)
                    strangers.append(stranger)
            return value

        found = opened(Kept(disturbed))
        results = together(lambda rank: found[rank].meet(agenda(rank), 5))
        assert results == {0: 20, 1: 20, 2: 20}
        closed([*found, *strangers])

    def test_another_user_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bootstrap.os, "geteuid", lambda: os.getuid() + 1)
        begin = time.monotonic()
        for error in opened(Kept()):
            assert isinstance(error, EngineError) and "belongs to user" in str(error)
        assert time.monotonic() - begin < 5

    @pytest.mark.parametrize("absent", range(WORLD))
    def test_who_does_not_come_is_named_and_may_come_later(self, absent: int) -> None:
        store = Kept()
        others = [rank for rank in range(WORLD) if rank != absent]
        for error in opened(store, 0.5, others):
            assert isinstance(error, TimeoutExceeded)
            words = f"rank {absent} (it has not called ficco) did not arrive within 0.5 s"
            assert words in str(error), error
        closed(opened(store))

    def test_a_rank_that_gave_up_comes_again(self) -> None:
        """Rank 1 gives up after 0.2 s and opens anew, while the others wait on."""
        store = Kept()

        def meet(rank: int) -> Rendezvous:
            if rank == 1:
                with pytest.raises(TimeoutExceeded):
                    Rendezvous(store.members(1), {}, 0.2)
            if rank == 2:
                time.sleep(2.0)
            return Rendezvous(store.members(rank), {}, 20)

        closed(list(together(meet).values()))

    @pytest.mark.parametrize("victim", range(WORLD))
    def test_who_has_died_is_named_soon(self, victim: int) -> None:
        """It had come, and its process is no more: nobody waits for the timeout."""

        def ended(key: str, value: Any) -> Any:
            return {**value, "born": "0"} if key == f"ficco/rank/{victim}" else value

        store = Kept(ended)
        store.set(f"ficco/rank/{victim}", json.dumps(_came()))
        begin = time.monotonic()
        others = [rank for rank in range(WORLD) if rank != victim]
        for error in opened(store, 30, others):
            assert isinstance(error, EngineError)
            assert f"rank {victim} (pid {os.getpid()}) has died" in str(error), error
            assert "Restart the processes" in str(error)
        assert time.monotonic() - begin < 10

    def test_who_raised_an_error_is_named_with_it(self) -> None:
        store = Kept()
        note_refusal(store.members(1), "InputError: w is None")
        begin = time.monotonic()
        for error in opened(store, 30, [0, 2]):
            assert isinstance(error, EngineError)
            assert "rank 1 cannot open the group because of an error" in str(error)
            assert "w is None" in str(error)
        assert time.monotonic() - begin < 10
        # All had raised it at their first try: at the second one nobody is missed.
        closed(together(lambda r: Rendezvous(store.members(r)._replace(turn=2), {}, 20)).values())


def _came() -> dict[str, Any]:
    return {"facts": {}, "kind": "the CPU", "turn": 1, **facts_of_process()}


class TestRendezvous:
    def test_all_get_what_was_agreed_again_and_again(self, rendezvous: list[Rendezvous]) -> None:
        for _ in range(20):
            assert set(together(lambda rank: rendezvous[rank].meet(agenda(rank), 5)).values()) == {
                20
            }

    def test_who_does_not_come_is_named(self, rendezvous: list[Rendezvous]) -> None:
        def late(rank: int) -> str:
            return f"Rank {rank} sleeps."

        for absent, there in ((2, range(2)), (0, range(1, 3))):
            found = together(
                lambda rank: rendezvous[rank].meet(agenda(rank, condition=late), 0.2), there
            )
            for error in found.values():
                assert isinstance(error, TimeoutExceeded)
                assert f"rank {absent} did not arrive within" in str(error)
                assert f"Rank {absent} sleeps." in str(error)
            # A late comer is not mixed up with the next rendezvous.
            assert set(together(lambda rank: rendezvous[rank].meet(agenda(rank), 5)).values()) == {
                20
            }

    def test_other_purposes_are_told_apart(self, rendezvous: list[Rendezvous]) -> None:
        found = together(
            lambda rank: rendezvous[rank].meet(agenda(rank, "grow" if rank else "reset"), 5)
        )
        for error in found.values():
            assert isinstance(error, EngineError)
            assert "rank 1 came to grow, rank 0 to reset. Make the same" in str(error)

    def test_other_calls_are_told_apart_before_all_have_come(self, rendezvous: list[Any]) -> None:
        """Ranks that meet for calls do not wait for a third rank; both calls are named."""
        begin = time.monotonic()
        found = together(
            lambda rank: rendezvous[rank].gather(f"do {rank}", 0, 30, f"Rank {rank} calls."),
            range(2),
        )
        for error in found.values():
            assert isinstance(error, EngineError)
            words = "rank 1 came to do 1, rank 0 to do 0. Rank 0 calls. Rank 1 calls. Make the same"
            assert words in str(error)
        assert time.monotonic() - begin < 5
        assert set(together(lambda rank: rendezvous[rank].meet(agenda(rank), 5)).values()) == {20}

    @pytest.mark.parametrize("waiter", [0, 2])
    def test_who_is_overtaken_is_told_unless_all_have_come(
        self, rendezvous: list[Any], waiter: int
    ) -> None:
        other = EngineError("it makes another call")
        with pytest.raises(EngineError, match="another call"):
            rendezvous[waiter].meet(agenda(waiter, overtaken=lambda: other), 30)
        joined = threading.Event()  # from here on, who is ahead has left the rendezvous

        def join(memory: int, facts: dict[str, Any]) -> str:
            joined.set()
            time.sleep(0.2)
            return "joined"

        def meet(rank: int) -> Any:
            if rank != waiter:
                return rendezvous[rank].meet(agenda(rank), 5)
            late = agenda(rank, join=join, overtaken=lambda: other if joined.is_set() else None)
            return rendezvous[rank].meet(late, 5)

        assert set(together(meet).values()) == {20, "joined"}

    @pytest.mark.parametrize("rank", range(WORLD))
    def test_memory_that_one_cannot_have_none_has(self, rendezvous: list[Any], rank: int) -> None:
        def no_room(memory: int, facts: dict[str, Any]) -> Any:
            raise MemoryError("4096 bytes cannot be had")

        def meet(each: int) -> Any:
            plain = agenda(each)
            return rendezvous[each].meet(plain._replace(join=no_room) if each == rank else plain, 5)

        for error in together(meet).values():
            assert isinstance(error, MemoryError)
            assert "4096 bytes" in str(error)
        assert set(together(lambda each: rendezvous[each].meet(agenda(each), 5)).values()) == {20}

    def test_the_last_rank_may_arrive_as_the_time_ends(
        self, rendezvous: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The leader reads the last message after its deadline, with nobody left to wait for."""
        leader = rendezvous[0]
        listen, arrived = leader._listen, set[int]()

        def late(*args: Any, arriving: bool = False) -> list[Any]:
            messages = list(listen(*args, arriving=arriving))
            arrived.update(rank for rank, message in messages if message["say"] == "ask")
            if arriving and len(arrived) == WORLD - 1:
                time.sleep(0.6)
            return messages

        monkeypatch.setattr(leader, "_listen", late)
        found = together(lambda rank: rendezvous[rank].meet(agenda(rank), 0.5 if not rank else 20))
        assert set(found.values()) == {10 * (WORLD - 1)}, found

    @pytest.mark.parametrize("forked", [False, True], ids=["alone", "with a forked child"])
    @pytest.mark.parametrize("gone", range(WORLD))
    def test_who_has_left_is_named_now_and_later(
        self, rendezvous: list[Any], gone: int, forked: bool
    ) -> None:
        held = rendezvous[gone]._peers.values() if forked else ()
        copies = [connection.dup() for connection in held]  # as a child has them
        rendezvous[gone].close()
        others = sorted(set(range(WORLD)) - {gone})
        for _ in range(2):
            begin = time.monotonic()
            for rank in others:  # one after the other: who comes late is told, too
                with pytest.raises(EngineError, match=rf"rank {gone} \(pid \d+\) has left"):
                    rendezvous[rank].meet(agenda(rank), 5)
            assert time.monotonic() - begin < 2
        for connection in copies:
            connection.close()

    def test_all_have_what_each_brings(self, rendezvous: list[Rendezvous]) -> None:
        for _ in range(3):
            found = together(lambda rank: rendezvous[rank].gather("compare", {"is": rank}, 5))
            assert all(each == [{"is": 0}, {"is": 1}, {"is": 2}] for each in found.values())

    def test_a_broken_group_ends_the_wait(self, rendezvous: list[Any]) -> None:
        broken = EngineError("it failed")
        begin = time.monotonic()
        for rank in range(2):
            with pytest.raises(EngineError, match="it failed"):
                rendezvous[rank].meet(agenda(rank, broken=lambda: broken), 30)
        assert time.monotonic() - begin < 2
        assert set(together(lambda rank: rendezvous[rank].meet(agenda(rank), 5)).values()) == {20}


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_closed_rank_does_not_meet(rendezvous: Any, rank: int) -> None:
    rendezvous[rank].close()
    with pytest.raises(EngineError, match="the group was closed"):
        rendezvous[rank].meet(agenda(rank), 20)


class Exchanging:
    """What `gathered_objects` asks of a runtime, over a rendezvous."""

    def __init__(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        self.world, self._rendezvous, self._timeout_s = WORLD, rendezvous, timeout_s

    def gathered(self, what: str, mine: Any, call: str = "") -> list[Any]:
        assert not call
        return self._rendezvous.gather(what, mine, self._timeout_s)


class TestObjects:
    @pytest.mark.parametrize("size", [0, 1, 10**6])
    def test_ranks_exchange_objects_of_any_size(self, rendezvous: Any, size: int) -> None:
        def brought(rank: int) -> Any:
            return {"rank": (rank, b"\xff" * (size * rank)), "none": None}

        def exchange(rank: int) -> Any:
            runtime: Any = Exchanging(rendezvous[rank], 20)
            return gathered_objects(runtime, "exchange objects", brought(rank))

        for found in together(exchange).values():
            assert found == [brought(rank) for rank in range(WORLD)]

    def test_a_rank_that_stops_halfway_is_named_by_the_timeout(self, rendezvous: Any) -> None:
        def exchange(rank: int) -> Any:
            if rank == 1:
                # Its length, and no more.
                return Exchanging(rendezvous[rank], 20).gathered("exchange objects", 10**6)
            runtime: Any = Exchanging(rendezvous[rank], 0.3)
            return gathered_objects(runtime, "exchange objects", bytes(10**6))

        found = together(exchange)
        for rank in (0, 2):
            assert isinstance(found[rank], TimeoutExceeded)
            assert "rank 1" in str(found[rank])
