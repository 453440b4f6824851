"""First calls of a process: several threads make them, or a call begins at every import of one."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ficco

X, W = torch.randn(8, 16), torch.randn(16, 8)
THREADS = 4


def whole() -> bool:
    """Call an operator by its full name, which loads ficco's modules; return if it is right."""
    return torch.allclose(ficco.all_gather_matmul(X, W), X @ W)


def from_name() -> Callable[[], bool]:
    """Return a call of an operator that was imported by its name, before a group is open."""
    from ficco import all_gather_matmul

    return lambda: torch.allclose(all_gather_matmul(X, W), X @ W)


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
            assert "inside another call of the same thread" in str(error)
            self.refused += 1
        finally:
            self.inside = False

    def end(self) -> None:
        sys.meta_path.remove(self)  # type: ignore[arg-type]


def call_at_imports(call: Callable[[], bool]) -> None:
    calls = CallsAtImports(call)
    assert call()
    calls.end()
    assert call()
    assert calls.refused > 0
    print(f"{calls.refused} calls refused, {calls.made} made")


def call_in_threads() -> None:
    call, start, right = from_name(), threading.Barrier(THREADS), []

    def run() -> None:
        start.wait()
        right.append(call())

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * THREADS


if __name__ == "__main__":
    assert "ficco.modules" not in sys.modules, "the first call is to load them"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if sys.argv[1] == "threads":
        call_in_threads()
    else:
        call_at_imports(whole if sys.argv[1] == "whole" else from_name())
    ficco.close()
    dist.destroy_process_group()
