"""Starts ranks as processes, commands them, and never leaves one behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ficco.core.machine import Machine
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

WORKER = Path(__file__).with_name("commanded_rank.py")
HOST = Machine.named("host")
DEADLINE_S = 60.0
SCHEDULES = (
    "serial", "shard_p2p", "uniform_fused_1d", "hetero_fused_1d", "hetero_unfused_1d",
    "uniform_fused_2d", "gated_1d",
)  # fmt: skip


class Rank:
    """One process, which the process that forks ranks has made.

    Attributes:
        pid: its number.
        said: the file of its errors.
    """

    def __init__(self, pid: int, commands: int, answers: int, said: Path) -> None:
        self.pid, self.said = pid, said
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb", buffering=0)  # select sees what was not read

    def send(self, do: str, /, *args: Any, **words: Any) -> None:
        self._commands.write(json.dumps({"do": do, "args": args, **words}).encode() + b"\n")

    def receive(self, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Return the answer to the oldest command that is not answered."""
        ready, _, _ = select.select([self._answers], [], [], deadline_s)
        line = self._answers.readline() if ready else b""
        assert line, f"no answer within {deadline_s} s; it said: {self.said.read_text()[-3000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End this one process, whatever state it is in."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._commands.close()
        self._answers.close()


class Ranks:
    """Processes by number; a context manager that ends them.

    They are forked from one that has imported PyTorch, which takes longer than all the rest.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self.folder, self._worlds = folder, 0
        commands, answers = ([os.pipe() for _ in range(count)] for _ in range(2))
        theirs = [end for pair in zip(commands, answers, strict=True)
                  for end in (pair[0][0], pair[1][1])]  # fmt: skip
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        self._forking = subprocess.Popen(
            [sys.executable, WORKER, *map(str, theirs)],
            stdout=subprocess.PIPE, env=environment, cwd=folder, pass_fds=theirs,
        )  # fmt: skip
        for end in theirs:
            os.close(end)
        assert self._forking.stdout
        pids = json.loads(self._forking.stdout.readline())
        self.all = [
            Rank(pid, commands[number][1], answers[number][0], folder / f"rank{number}.txt")
            for number, pid in enumerate(pids)
        ]

    def world(self, numbers: Sequence[int], members: Sequence[Sequence[int]]) -> None:
        """Make a torch.distributed world of some processes, and groups of its ranks."""
        self._worlds += 1
        store = str(self.folder / f"store{self._worlds}")
        for rank, number in enumerate(numbers):
            self.all[number].send("world", store, rank, len(numbers), members)
        for number in numbers:
            answer = self.all[number].receive()
            assert "error" not in answer, answer

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for rank in self.all:
            rank.kill()
        self._forking.wait(20)  # it waits for them
        assert self._forking.stdout
        self._forking.stdout.close()

    def ask(
        self, ranks: Iterable[int], do: str, /, *args: Any, **words: Any
    ) -> dict[int, dict[str, Any]]:
        """Command some ranks at once and return their answers by rank."""
        ranks = list(ranks)
        for rank in ranks:
            self.all[rank].send(do, *args, **words)
        return {rank: self.all[rank].receive() for rank in ranks}

    def good(self, ranks: Iterable[int], do: str, /, *args: Any, **words: Any) -> dict[int, Any]:
        """Command some ranks, none of which may fail, and return their values."""
        answers = self.ask(ranks, do, *args, **words)
        bad = {rank: f"{a['error']}: {a['text']}" for rank, a in answers.items() if "error" in a}
        assert not bad, f"{do} {args} {words}: {bad}"
        return {rank: answer["value"] for rank, answer in answers.items()}

    def right(self, ranks: Iterable[int], call: dict[str, Any]) -> list[list[str]]:
        """Run a call whose results the oracle accepts; return digests of outputs by rank."""
        values = self.good(ranks, "call", **call)
        for rank, value in values.items():
            assert not value["wrong"], f"rank {rank}, {call}: {value['wrong']}"
        return [value["bits"] for _, value in sorted(values.items())]


def posed(
    name: str, problem: Problem, schedule: str, seed: int = 0, **words: Any
) -> dict[str, Any]:
    """Return the words of `call` that run a problem on the group of this name."""
    resolved = Schedule.named(schedule).resolve(problem.world, HOST)
    return {
        "name": name, "problem": problem.to_json(), "schedule": resolved.to_json(),
        "seed": seed, **words,
    }  # fmt: skip


def gathering(world: int, m: int, n: int, k: int, dtype: str = "float32") -> Problem:
    return Problem.chunked("all_gather_matmul", world, m, n, k, dtype)


def stopped(pid: int) -> None:
    """Stop a process, and return when it has."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.005)


def shared_memory() -> Sequence[str]:
    """What lies in the folders where processes leave shared memory and sockets behind."""
    return sorted(str(path) for path in Path("/dev/shm").iterdir())
