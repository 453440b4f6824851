"""A rank as a process: carries out one command a line of JSON, and answers with one line each.

Started and commanded by `ranks.py`; it ends with its input. The program forks the ranks:
python commanded_rank.py COMMANDS ANSWERS COMMANDS ANSWERS ... (descriptors of pipes, two a rank).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ficco
from ficco.core.machine import Link, Machine
from ficco.engine import host
from ficco.engine.compute import dtype_of, named
from ficco.lowering import lower_rank
from ficco.operators import oracle
from ficco.operators.problem import Problem
from ficco.plan import WindowBytes
from ficco.plan.schedule import Schedule
from ficco.runtime.process import ProcessRuntime

HOST = Machine.named("host")
runtimes: dict[str, ProcessRuntime] = {}
groups: dict[str, Any] = {}


def join_world(store: str, rank: int, world: int, members: list[list[int]]) -> None:
    """Enter a new torch.distributed world, and make groups of its ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    groups.clear()
    for some in members:
        groups["-".join(map(str, some))] = dist.new_group(some)


def open_group(name: str, timeout_s: float, mesh: bool = False, gbps: float = 0) -> list[int]:
    """Make a runtime of a group of this world; its name is made of its ranks: "0-2"."""
    group = groups[name]
    machine = HOST
    if gbps:
        machine = Machine("paced", 1, 8, "host", (Link("node", "pair", ((1, gbps),)),))
    if mesh:
        from torch.distributed.device_mesh import DeviceMesh

        group = DeviceMesh.from_group(group, "cpu")
    runtimes[name] = ProcessRuntime(group, machine, named("numpy"), timeout_s)
    return [runtimes[name].rank, runtimes[name].world]


def call(
    name: str, problem: dict[str, Any], schedule: dict[str, Any], seed: int, times: int = 1,
    fill_nan: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Run a problem with the oracle's inputs; return digests of the outputs, and the verdict."""
    runtime = runtimes[name]
    posed = Problem.from_json(problem)
    plan = Schedule.from_json(schedule)
    given = oracle.inputs(posed, seed)
    buffers = lower_rank(posed, plan, runtime.rank).buffers
    wrong, digests = [], []
    for turn in range(times):
        arrays = dict(given[runtime.rank])
        for buffer in buffers:
            if buffer.role == "output":
                arrays[buffer.name] = np.full((buffer.rows, buffer.cols), np.nan).astype(
                    dtype_of(buffer.dtype)
                )
        outputs = [b.name for b in buffers if b.role == "output"]
        if fill_nan:
            arrays[outputs[0]] = arrays[outputs[0]][:1]
        runtime.execute(posed, plan, arrays)
        if turn == 0:
            (exact,) = oracle.results(posed, given, [runtime.rank])
            for output, wanted in zip(outputs, exact, strict=True):
                verdict = oracle.judge(arrays[output], wanted, posed.dtype)
                if not verdict.ok:
                    wrong.append(f"{output}: error {verdict.max_rel_error:.2e}")
        digests = [hashlib.sha256(arrays[o].tobytes()).hexdigest() for o in outputs]
    return {"wrong": wrong, "bits": digests}


def function(
    name: str,
    columns: int = 5,
    inner: int = 3,
    fill_nan: bool = False,
    times: int = 1,
    schedule: str = "auto",
    alarm_s: float = 0,
) -> bool:
    """Call all_gather_matmul of whole numbers; return whether all results were right.

    An alarm may come some time after the calls began.
    """
    group = groups[name]
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    xs = [torch.arange(4.0 * inner).reshape(4, inner) % 31 + 7 * r for r in range(world)]
    w = torch.arange(float(inner * columns)).reshape(inner, columns) % 29
    given = w.double() if fill_nan else w
    wanted = torch.cat(xs) @ w
    signal.setitimer(signal.ITIMER_REAL, alarm_s)
    return all(
        torch.equal(
            ficco.all_gather_matmul(xs[rank], given, group=group, schedule=schedule), wanted
        )
        for _ in range(times)
    )


def gradient(name: str, second: bool = False) -> None:
    """Call all_gather_matmul and its gradient, or ask for a second one, which is refused."""
    x = torch.ones(4, 3, requires_grad=True)
    y = ficco.all_gather_matmul(x, torch.ones(3, 5), group=groups[name])
    y.sum().backward(create_graph=second)


def function_in_a_child(name: str, measured: bool = False) -> str:
    """Fork, and call in the child, which may measure the machine first; return what that says."""
    ours, its = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.environ["FICCO_MEASURE"] = str(int(measured))
        said = "it returned"
        try:
            function(name)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        ficco.close(groups[name])  # nothing, as it is the parent's
        try:
            function(name)
        except Exception as error:
            said += f" {type(error).__name__}: {error}"
        os.write(its, said.encode())
        os._exit(0)
    os.close(its)
    with os.fdopen(ours) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return said


class Alarm(TimeoutError):
    """An exception of a program, which its handler of a signal raises."""


def handle(name: str) -> None:
    """Handle Ctrl-C as Python does, SIGALRM by an exception, SIGUSR1 by calls, which are refused.

    The errors of the calls go to stderr.
    """

    def calls(*_: Any) -> None:
        for call in (lambda: function(name), lambda: ficco.close(groups[name])):
            try:
                call()
            except ficco.FiccoError as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def raises(*_: Any) -> None:
        raise Alarm("time is up")

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, calls)
    signal.signal(signal.SIGALRM, raises)


def interrupted(name: str, after_s: float) -> None:
    """Make calls until an alarm, which may come at any moment of a call."""
    handle(name)
    function(name, times=10**6, alarm_s=after_s)


def interrupted_start(name: str) -> None:
    """Make a call in which Ctrl-C comes as its program has started."""

    class Program:
        def __init__(self, *args: Any) -> None:
            self._program = original(*args)

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self._program, attribute)

        def start(self, *args: Any) -> None:
            self._program.start(*args)
            raise KeyboardInterrupt

    original = host._native.Program
    host._native.Program = Program  # type: ignore[assignment, misc]
    try:
        function(name, inner=7, schedule="shard_p2p")
    finally:
        host._native.Program = original  # type: ignore[misc]


def tuned(name: str, alarm_s: float = 0) -> bool:
    """Call as `function`, in `ficco.tune`, which measures for a while; the alarm may come in it."""
    with ficco.tune(schedules=64):
        return function(name, inner=3000, columns=1500, alarm_s=alarm_s)


def leave_a_child() -> int:
    """Fork a process that never calls ficco; return its number."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


def leave() -> None:
    """End this process in order."""
    atexit._run_exitfuncs()
    os._exit(0)


def state(name: str) -> dict[str, Any]:
    """What the process holds."""
    windows = runtimes[name].window_bytes if name in runtimes else 0
    maps = Path("/proc/self/maps").read_text()
    return {
        "files": _files(),
        "windows": windows,
        "shared": maps.count("memfd:ficco"),
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }


def _files() -> list[str]:
    """What is open, but for gloo's connections, which it closes when a peer has died."""
    ours = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            name = os.readlink(f"/proc/self/fd/{number}")
            if not name.startswith("socket:") or name[8:-1] in ours:
                found.append(name)
    return sorted(found)


def timeline(name: str) -> list[int]:
    """Ranks of the spans, and how many there are."""
    spans = runtimes[name].timeline().spans
    return [*sorted({span.rank for span in spans}), len(spans)]


def reset(name: str) -> None:
    runtimes[name].reset()


def agree(name: str, call: str) -> list[Any]:
    """Exchange data for a call, as the first call by auto does."""
    return runtimes[name].gathered("agree", runtimes[name].rank, call)


def grow(name: str, window_bytes: int) -> None:
    """Ask for windows by their size, which no problem of this machine could need."""
    runtimes[name]._meet("grow the windows", WindowBytes(window_bytes))


def close(name: str) -> None:
    runtimes.pop(name).close()


COMMANDS = {
    "world": join_world,
    "open": open_group,
    "call": call,
    "function": function,
    "gradient": gradient,
    "function_in_a_child": function_in_a_child,
    "prepare": lambda name, timeout_s: ficco.prepare(groups[name], timeout_s=timeout_s),
    "reset_functions": lambda name: ficco.reset(groups[name]),
    "close_functions": lambda name: ficco.close(groups[name]),
    "handle": handle,
    "interrupted": interrupted,
    "interrupted_start": interrupted_start,
    "tuned": tuned,
    "leave_a_child": leave_a_child,
    "leave": leave,
    "state": state,
    "timeline": timeline,
    "reset": reset,
    "agree": agree,
    "grow": grow,
    "close": close,
    "sleep": time.sleep,
    "echo": lambda word: word,
}


def fork(ends: list[int]) -> None:
    """Be every rank in a child process, tell their numbers, and wait until all have ended."""
    pids = []
    for at in range(0, len(ends), 2):
        pid = os.fork()
        if pid == 0:
            said = os.open(f"rank{at // 2}.txt", os.O_WRONLY | os.O_CREAT)
            for target, end in enumerate((*ends[at : at + 2], said)):
                os.dup2(end, target)
            for end in ends:  # a pipe ends when its own rank does
                os.close(end)
            main()
            os._exit(0)
        pids.append(pid)
    for end in ends:
        os.close(end)
    print(json.dumps(pids), flush=True)
    for _ in pids:
        os.wait()


def main() -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the gloo of PyTorch 2.9 prints to stdout
    for line in sys.stdin:
        asked = json.loads(line)
        begin = time.monotonic()
        reply: dict[str, Any] = {}
        if asked.pop("announced", False):
            print("begins", file=sys.stderr, flush=True)
        try:
            reply["value"] = COMMANDS[asked.pop("do")](*asked.pop("args", ()), **asked)
        except (Exception, KeyboardInterrupt) as error:
            reply["error"] = type(error).__name__
            reply["text"] = str(error)
            reply["rank"] = getattr(error, "rank", None)
        reply["seconds"] = time.monotonic() - begin
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    fork([int(end) for end in sys.argv[1:]])
