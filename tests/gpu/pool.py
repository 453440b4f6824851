"""Groups of rank processes (serve.py) that live for many checks, and the order in which they run.

Processes take longer to start than most checks last. So checks of one number of ranks and one
environment share a group, the next groups start while others work, those of a later stage too, and
several groups work at once where nothing speaks against it. A group in which a check fails is
ended; the next check gets a new one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from checks import A_RANK_A_GPU, Check, Stage
from command_lines import CALM

__all__ = ["Group", "Key", "Pool", "Ran", "key_of", "lanes_here"]

SERVE = Path(__file__).with_name("serve.py")
START_S = 90.0  # to import PyTorch and to join, when other groups do so, too
GRACE_S = 5.0  # for the other ranks, once one has failed
TAIL = 3000  # characters of what a rank said
CORES_PER_LANE, MOST_LANES = 6, 5
FEWEST, MOST_CHECKS = 3, 6  # of a group in a lane, so that lanes end together


class Key(NamedTuple):
    """What groups differ in.

    Attributes:
        world: ranks.
        environment: as sorted pairs.
        only: the check that has the group to itself, or nothing.
    """

    world: int
    environment: tuple[tuple[str, str], ...]
    only: str


class Work(NamedTuple):
    """Checks that one group makes, one after another, and a number that is unique."""

    number: int
    key: Key
    checks: Sequence[Check]


class Ran(NamedTuple):
    """What a check said: nothing where it was right, and how long it lasted."""

    wrong: str
    seconds: float


def key_of(check: Check, gpus: int) -> Key:
    """Return the key of the group that a check runs in."""
    world = gpus if check.world == A_RANK_A_GPU else check.world
    only = check.id if check.fresh else ""
    return Key(world, tuple(sorted(check.environment.items())), only)


def lanes_here() -> int:
    """Return how many groups may work at once on this machine."""
    return max(1, min(MOST_LANES, len(os.sched_getaffinity(0)) // CORES_PER_LANE))


class Group:
    """The processes of all ranks. They start at once; `wait` waits until they have joined.

    Args:
        world: how many.
        folder: fresh, for the store and for what ranks say.
        environment: set in addition to this process's.
        command: starts a rank, before the arguments STORE RANK WORLD REPLIES.
    """

    def __init__(
        self, world: int, folder: Path, environment: Mapping[str, str],
        command: Sequence[str] = (sys.executable, "-P", str(SERVE), "cuda"),
    ) -> None:  # fmt: skip
        given = os.environ | CALM
        self.world, self._begun = world, time.monotonic()
        self.usable, self._joined = True, False
        self._logs = [folder / f"rank{rank}.txt" for rank in range(world)]
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._replies: list[int] = []
        self._unread = [b""] * world
        for rank, path in enumerate(self._logs):
            ours, theirs = os.pipe()
            words = [str(folder / "store"), str(rank), str(world), str(theirs)]
            with path.open("w") as log:
                self._ranks.append(
                    subprocess.Popen(
                        [*command, *words], stdin=subprocess.PIPE, stdout=log,
                        stderr=subprocess.STDOUT, env=given | dict(environment), cwd=folder,
                        pass_fds=[theirs],
                    )
                )  # fmt: skip
            os.close(theirs)
            self._replies.append(ours)

    def wait(self) -> None:
        """Wait until all ranks have joined; raise AssertionError where they do not."""
        if self._joined:
            return
        left = START_S - (time.monotonic() - self._begun)
        wrong = self._answered("to join the group", max(left, 1.0), False, [0] * self.world)
        assert not wrong, wrong
        self._joined = True

    def check(self, check: Check, words: Mapping[str, Any], limit_s: float) -> Ran:
        """Let all ranks make a check."""
        begin = time.monotonic()
        try:
            self.wait()
        except AssertionError as error:
            return Ran(str(error), time.monotonic() - begin)
        begin = time.monotonic()
        said = [path.stat().st_size for path in self._logs]  # before a rank can say more
        order = json.dumps({"scenario": check.scenario, "words": dict(words)}) + "\n"
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # a rank that died is seen below
                assert rank.stdin is not None
                rank.stdin.write(order.encode())
                rank.stdin.flush()
        wrong = self._answered(f"check {check.id}", limit_s, check.ends, said)
        return Ran(wrong, time.monotonic() - begin)

    def _answered(self, what: str, limit_s: float, ends: bool, before: Sequence[int]) -> str:
        """Return what is wrong with the answers of all ranks, or nothing.

        before: bytes that each rank had said before it was asked.
        """
        deadline, wrong = time.monotonic() + limit_s, dict[int, str]()
        waiting = set(range(self.world))
        with selectors.DefaultSelector() as selector:
            for rank, ours in enumerate(self._replies):
                selector.register(ours, selectors.EVENT_READ, rank)
            while waiting and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    answer = self._read(key.data)
                    if answer is None:
                        continue
                    waiting.discard(key.data)
                    if answer == "end":
                        selector.unregister(key.fileobj)
                    told = self._judged(key.data, answer, ends)
                    if told:
                        wrong[key.data] = told
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in waiting:
            wrong.setdefault(
                rank, f"not done after {'the others failed' if wrong else f'{limit_s:g} s'}"
            )
        if ends or wrong:
            if waiting:
                self._show_stacks(waiting)
            self.kill()
        if not wrong:
            return ""
        said = [f"{what}, {self.world} ranks:"]
        for rank, path in enumerate(self._logs):
            with path.open(errors="replace") as log:
                log.seek(before[rank])
                text = log.read()[-TAIL:]
            said.append(f"---- rank {rank}: {wrong.get(rank, 'right')}\n{text}")
        return "\n".join(said)

    def _read(self, rank: int) -> str | None:
        """Return a rank's answer, "end" where its process has ended; None: a line is not whole."""
        found = os.read(self._replies[rank], 4096)
        if not found:
            return "end"
        self._unread[rank] += found
        line, newline, rest = self._unread[rank].partition(b"\n")
        if not newline:
            return None
        self._unread[rank] = rest
        return line.decode()

    def _judged(self, rank: int, answer: str, ends: bool) -> str:
        if answer == "end":
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._ranks[rank].wait(GRACE_S)
            code = self._ranks[rank].returncode
            if ends and code == 0 and "right" in self._logs[rank].read_text(errors="replace"):
                return ""
            return f"its process ended with exit code {code}"
        if ends:
            return "its process was to end in this check, and did not"
        return "" if answer == "true" else "failed"

    def _show_stacks(self, ranks: set[int]) -> None:
        """Let ranks write the stacks of their threads, to show where each hangs."""
        for rank in ranks:
            if self._ranks[rank].poll() is None:
                self._ranks[rank].send_signal(signal.SIGUSR1)
        time.sleep(1.0)

    def kill(self) -> None:
        """End all processes now."""
        self.usable = False
        for rank in self._ranks:
            if rank.poll() is None:
                rank.kill()
        for rank in self._ranks:
            rank.wait(30)
            assert rank.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.close()
        for ours in self._replies:
            os.close(ours)
        self._replies = []

    def leave(self) -> None:
        """Let all processes end by themselves, soon; then end what is left."""
        if not self.usable:
            return
        for rank in self._ranks:
            assert rank.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.close()
        end = time.monotonic() + GRACE_S
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(end - time.monotonic(), 0.1))
        self.kill()


class Pool:
    """Runs checks in groups, stage by stage: several groups at once, but for those that are alone.

    Args:
        checks: all that will be asked for, in order of their stages.
        gpus: how many there are.
        folder: for the groups' folders.
        calls: what `--calls` gives, or None for what the table says.
        lanes: groups that may work at once.
    """

    def __init__(
        self, checks: Sequence[Check], gpus: int, folder: Path, calls: int | None, lanes: int
    ) -> None:
        self._gpus, self._folder, self._calls, self._lanes = gpus, folder, calls, lanes
        self._lock, self._groups = threading.Lock(), 0
        self._ahead: dict[int, Group] = {}  # by number of the work; started, and not in use yet
        self._results: dict[str, Future[Ran]] = {check.id: Future() for check in checks}
        self._queues: dict[Stage, list[Work]] = {}
        numbers = itertools.count()
        for stage in Stage:
            mine = [check for check in checks if check.stage == stage]
            most = min(max(-(-len(mine) // lanes), FEWEST), MOST_CHECKS)
            self._queues[stage] = _divided(mine, gpus, most, numbers)
        self._stopped, self._stage = False, Stage.BESIDE
        self._threads: list[threading.Thread] = []
        self._start_lanes()

    def result(self, check: Check) -> Ran:
        """Return what a check said, when it has run."""
        while self._stage < check.stage:
            for thread in self._threads:
                thread.join()
            self._stage = Stage(self._stage + 1)
            self._start_lanes()
        return self._results[check.id].result()

    def close(self) -> None:
        """Let no check begin any more, and end all processes."""
        self._stopped = True
        for thread in self._threads:
            thread.join()
        for group in self._ahead.values():
            group.kill()

    def _start_lanes(self) -> None:
        lanes = 1 if self._stage == Stage.ALONE else self._lanes
        self._threads = [threading.Thread(target=self._lane, daemon=True) for _ in range(lanes)]
        for thread in self._threads:
            thread.start()

    def _lane(self) -> None:
        queue = self._queues[self._stage]
        while not self._stopped:
            with self._lock:
                if not queue:
                    self._start_ahead()
                    return
                work = queue.pop(0)
            self._run(work)

    def _start_ahead(self) -> None:
        """Start the group of what comes next and has none, in this stage or in a later one."""
        coming = itertools.chain.from_iterable(self._queues[stage] for stage in Stage)
        work = next((each for each in coming if each.number not in self._ahead), None)
        if work is not None and not self._stopped:
            self._ahead[work.number] = self._started(work.key)

    def _run(self, work: Work) -> None:
        """Run checks, each in a group that is usable, and start the group of what comes next."""
        group: Group | None = None
        checks = work.checks
        try:
            with self._lock:
                group = self._ahead.pop(work.number, None) or self._started(work.key)
                self._start_ahead()
            for check in checks:
                if self._stopped:
                    break
                if not group.usable:
                    with self._lock:
                        group = self._started(work.key)
                words = dict(check.words)
                limit_s = check.limit_s
                if check.repeats and self._calls is not None:
                    limit_s *= max(1.0, self._calls / words[check.repeats])
                    words[check.repeats] = self._calls
                self._results[check.id].set_result(group.check(check, words, limit_s))
        except BaseException as error:
            for check in checks:
                if not self._results[check.id].done():
                    self._results[check.id].set_exception(error)
        finally:
            if group is not None:
                group.leave()
            for check in checks:
                self._results[check.id].cancel()  # where it has not run

    def _started(self, key: Key) -> Group:
        self._groups += 1
        folder = self._folder / f"group{self._groups}"
        folder.mkdir()
        return Group(key.world, folder, dict(key.environment))


def _divided(checks: Sequence[Check], gpus: int, most: int, numbers: Iterator[int]) -> list[Work]:
    """Divide checks by the groups that they need, and these into no more than `most` checks."""
    found: dict[Key, list[Check]] = {}
    for check in checks:
        found.setdefault(key_of(check, gpus), []).append(check)
    parts = [
        (key, mine[i : i + most]) for key, mine in found.items() for i in range(0, len(mine), most)
    ]
    return [Work(next(numbers), key, mine) for key, mine in parts]
