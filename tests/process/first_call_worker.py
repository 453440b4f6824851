"""First calls of a process, while threads, forks or the handlers of signals interfere.

[RANK=R WORLD_SIZE=N] python first_call_worker.py CHECK STORE

CHECK is whole, name, raising, forking, threads, closing or dying. STORE is a file that does not
exist.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

import ficco

torch.manual_seed(0)
X, W = torch.randn(8, 16), torch.randn(16, 8)
THREADS = 4


def right(y: torch.Tensor) -> bool:
    """Return whether a result is right; all ranks have equal shards."""
    return torch.allclose(y, (X @ W).repeat(dist.get_world_size(), 1))


def whole() -> bool:
    """Call an operator by its full name, which loads ficco's modules; return if it is right."""
    return right(ficco.all_gather_matmul(X, W))


def from_name() -> Callable[[], bool]:
    """Return a call of an operator that was imported by its name, before a group is open."""
    from ficco import all_gather_matmul

    return lambda: right(all_gather_matmul(X, W))


class CallsAtImports:
    """Send this process a signal at each import; the signal's handler makes a call."""

    def __init__(self, call: Callable[[], bool]) -> None:
        self.call, self.refused, self.made, self.inside = call, 0, 0, False
        signal.signal(signal.SIGUSR1, self.handle)
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if not self.inside:
            signal.raise_signal(signal.SIGUSR1)

    def handle(self, *_: object) -> None:
        self.inside = True
        try:
            assert self.call()
            self.made += 1
        except ficco.EngineError as error:
            assert "the same thread" in str(error)
            self.refused += 1
        finally:
            self.inside = False

    def end(self) -> None:
        sys.meta_path.remove(self)  # type: ignore[arg-type]


def call_at_imports(call: Callable[[], bool]) -> None:
    """Calls of a handler are made after the import, or refused inside the call."""
    calls = CallsAtImports(call)
    assert call()
    calls.end()
    assert call()
    assert calls.refused + calls.made >= 1
    print(f"{calls.refused} calls refused, {calls.made} made")


def raise_at_imports() -> None:
    """The handler of a signal that comes during an import raises; a later call is right."""

    class Alarm(Exception):
        pass

    def handle(*_: object) -> None:
        raise Alarm

    class Signals:
        def __init__(self, at: int) -> None:
            self.left = at

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGUSR1)

    before, at, came = signal.signal(signal.SIGUSR1, handle), 1, True
    while came:
        child = os.fork()
        if child == 0:
            sys.meta_path.insert(0, Signals(at))  # type: ignore[arg-type]
            try:
                whole()
            except Alarm:
                assert signal.getsignal(signal.SIGUSR1) is handle
                os._exit(0 if whole() else 1)
            os._exit(2)  # there are not so many imports
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        came = ended == 0
        assert came or (ended == 2 and at > 100), (at, ended)
        at += 23
    signal.signal(signal.SIGUSR1, before)


def fork_at_an_import() -> None:
    """A child that is forked while another thread loads modules is told, and does not wait."""
    found = []

    def run() -> None:
        found.append(whole())

    def execute(loader: SourceFileLoader, module: ModuleType) -> None:
        if module.__name__ == "ficco.api.operators":
            reached.set()
            forked.wait(30)
        exec_module(loader, module)

    reached, forked = threading.Event(), threading.Event()
    exec_module = SourceFileLoader.exec_module
    SourceFileLoader.exec_module = execute  # type: ignore[assignment,method-assign]
    thread = threading.Thread(target=run)
    thread.start()
    assert reached.wait(30)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that waits
        try:
            whole()
        except ficco.EngineError as error:
            os._exit(0 if "forked while another thread loaded" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    forked.set()
    thread.join()
    assert found == [True] and whole()


def in_threads(run: Callable[[], object]) -> None:
    """Run a function in several threads at once; raise the first of their errors."""
    start, errors = threading.Barrier(THREADS), []

    def begin() -> None:
        start.wait()
        try:
            run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=begin) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def call_in_threads() -> None:
    """All threads' first calls use one runtime. Ranks need long to open a group together."""
    call = from_name()
    from ficco.api import groups

    opened, runtime_of = [], groups.ProcessRuntime

    def noted(*given: Any, **named: Any) -> Any:
        opened.append(runtime_of(*given, **named))
        return opened[-1]

    groups.ProcessRuntime = noted  # type: ignore[assignment,misc]

    def run() -> None:
        assert call()

    in_threads(run)
    assert len(opened) == 1, opened


def close_in_threads() -> None:
    """Threads may close one group at once."""
    call, interval = from_name(), sys.getswitchinterval()
    for _ in range(30):
        assert call()
        sys.setswitchinterval(1e-6)
        in_threads(ficco.close)
        sys.setswitchinterval(interval)


def die_at_an_import(rank: int, kept: Any) -> None:
    """Rank 1 makes no call, and then dies as it imports ficco's modules; rank 0 is told soon."""
    if rank == 1:
        kept.wait(["late"], timedelta(seconds=60))
        sys.meta_path.insert(0, Dies())  # type: ignore[arg-type]
        whole()
    begin = time.monotonic()
    try:
        ficco.prepare(timeout_s=1.0)
    except ficco.TimeoutExceeded as error:
        assert "rank 1 (it has not called ficco) did not arrive within 1 s" in str(error), error
    assert 1.0 < time.monotonic() - begin < 10
    kept.set("late", "1")
    begin = time.monotonic()
    try:
        whole()
    except ficco.EngineError as error:
        assert "rank 1 (pid" in str(error) and "has died" in str(error), error
    assert time.monotonic() - begin < 10
    os._exit(0)  # torch.distributed would wait for rank 1


class Dies:
    """Ends this process during the import of an operator."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "ficco.api.operators":
            os._exit(0)


def main(how: str, store: str) -> None:
    if how in ("whole", "name", "raising", "forking", "dying"):
        assert "ficco.api" not in sys.modules, "the first call is to load them"
    rank, world = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
    world = max(world, 1)
    kept = dist.FileStore(store, world)
    dist.init_process_group("gloo", store=kept, rank=rank, world_size=world)
    if how == "threads":
        call_in_threads()
    elif how == "dying":
        die_at_an_import(rank, kept)
    elif how == "raising":
        raise_at_imports()
    elif how == "forking":
        fork_at_an_import()
    elif how == "closing":
        close_in_threads()
    else:
        call_at_imports(whole if how == "whole" else from_name())
    ficco.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
