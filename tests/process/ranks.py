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

from ficco.machine import Machine
from ficco.problem import Problem
from ficco.schedule import Schedule

WORKER = Path(__file__).with_name("worker.py")
HOST = Machine.named("host")
DEADLINE_S = 60.0
SCHEDULES = (
    "serial", "shard_p2p", "uniform_fused_1d", "hetero_fused_1d", "hetero_unfused_1d",
    "uniform_fused_2d", "gated_1d",
)  # fmt: skip


class Rank:
    """One process."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.said = folder / f"rank{rank}.txt"
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        with self.said.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,  # select sees what was not read
                env=environment,
                cwd=folder,
            )

    def send(self, do: str, /, *args: Any, **words: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"do": do, "args": args, **words}).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Return the answer to the oldest command that is not answered."""
        assert self.process.stdout
        ready, _, _ = select.select([self.process.stdout], [], [], deadline_s)
        line = self.process.stdout.readline() if ready else b""
        assert line, f"no answer within {deadline_s} s; it said: {self.said.read_text()[-3000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End this one process, whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Ranks:
    """Processes by number; a context manager that ends them."""

    def __init__(self, count: int, folder: Path) -> None:
        self.folder, self._worlds = folder, 0
        self.all = [Rank(number, folder) for number in range(count)]

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
