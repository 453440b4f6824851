"""A rank of a sweep on GPUs without a GPU: memory is the host's, a graph is its calls again.

What is real: the processes, how they meet, what runs in which order, the operators (over gloo),
what is checked, said and written down. Of the environment, DOUBLE_DIES names a schedule that ends
its ranks, DOUBLE_WRONG one whose result is wrong; DOUBLE_ENDS and DOUBLE_FAILS name what else ends
rank 1 or fails on it, of pieces, trace and leave.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rendezvous import give_way

import ficco
from ficco.api import groups
from ficco.cli.sweeping.gpu import rank
from ficco.measure import cases, clock, ranks, rounds
from ficco.plan.schedule import Schedule


class Graph:
    """Calls that are made again when it is replayed."""

    def __init__(self, config: Any, calls: int) -> None:
        self._config, self._calls = config, calls

    def replay(self) -> None:
        for i in range(self._calls):
            self._config.last.copy_(self._config.call(i))

    @classmethod
    def capturing(cls, capture: Any) -> Any:
        """Return `capture` with a graph that makes the calls of what is captured."""

        def captured(timer: Any, config: Any, pool: Any) -> None:
            cuda: Any = torch.cuda
            cuda.CUDAGraph = lambda: cls(config, timer.calls)
            capture(timer, config, pool)

        return captured


class Event:
    """A time on the host's clock."""

    def __init__(self, enable_timing: bool) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other._at - self._at)


def open_group(folder: Path, options: Any = None) -> tuple[int, int]:
    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=number, world_size=world
    )
    return number, world


def plain(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def on_host(make: Any) -> Any:
    """Return a function of torch that makes what was meant for a GPU on the host."""

    def made(*args: Any, **words: Any) -> Any:
        return make(*args, **{k: v for k, v in words.items() if k != "device"})

    return made


def operator(run: Any) -> Any:
    """Return ficco's call with a schedule, spoilt as the environment says."""

    def nan_filled(self: Any, schedule: Schedule) -> Any:
        by_copies = replace(schedule, transport="dma")  # there is no NCCL here
        call = run(self, by_copies if schedule.transport == "collective" else schedule)

        def made(i: int) -> torch.Tensor:
            if schedule.name == os.environ.get("DOUBLE_DIES") and dist.get_rank() == 1:
                os._exit(3)
            found = call(i)
            if schedule.name == os.environ.get("DOUBLE_WRONG"):
                found = found.clone()
                found[-1, -1] += 0.01  # which is next to nothing of the whole
            return found

        return made

    return nan_filled


def spoilt_at(what: str, run: Any) -> Any:
    """Return a function that rank 1 ends or fails in, if the environment says so."""

    def made(*args: Any) -> Any:
        if os.environ["RANK"] == "1" and what in os.environ.get("DOUBLE_ENDS", "").split():
            os._exit(3)
        if os.environ["RANK"] == "1" and what in os.environ.get("DOUBLE_FAILS", "").split():
            raise RuntimeError(f"{what} is spoilt")
        return run(*args)

    return made


def main(folder: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    cuda: Any = torch.cuda
    cuda.synchronize = cuda.empty_cache = lambda *args: None
    cuda.graph_pool_handle = lambda: None
    cuda.Event = Event
    cuda.current_stream = lambda: None
    cuda.graph = lambda graph, **_: nullcontext()
    clock.Timer.capture = Graph.capturing(clock.Timer.capture)
    clock._unowned = lambda result: result.clone()  # whose memory a GPU's graph would keep
    cases.plain = plain
    cases._CHECKED_AT_ONCE = 100  # some columns at a time
    cases.Operands.__init__.__defaults__ = (plain,)
    cases.Operands.ficco = operator(cases.Operands.ficco)
    torch.empty, torch.tensor = on_host(torch.empty), on_host(torch.tensor)
    rank.pieces_of = spoilt_at("pieces", rank.pieces_of)
    rank._CaseRun._trace = spoilt_at("trace", rank._CaseRun._trace)
    rank.leave = spoilt_at("leave", rank.leave)
    rank.open_group = open_group
    rank.grow_windows = lambda layouts, number: None
    give_way()
    ranks.WAIT_S = rank.WAIT_S = 20.0
    prepare = ficco.prepare
    ficco.prepare = lambda machine, timeout_s: prepare(machine="host", timeout_s=timeout_s)
    groups.gpu_runtime = lambda group, device: groups.runtime(group)
    assert rounds.REGIMES
    rank.main(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
