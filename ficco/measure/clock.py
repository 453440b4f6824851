"""Time one configuration in one regime, independent of operators.

eager         calls back to back between two events, after two untimed calls
synchronized  each call from its start to the device's end, on the host's clock
captured      calls in one CUDA graph, its replay between two events
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ficco.engine.compute.torch_device import TorchDeviceCompute
from ficco.measure.launching import Rendezvous

STUCK_S = 90.0  # a longer step of one rank ends its process
SYNCHRONIZED_CALLS = 2  # calls of one run


def beat(allowed_s: float = STUCK_S) -> None:
    """Restart this process's watchdog, which ends it after `allowed_s` without another beat."""
    if os.environ.get("FICCO_PARENT", str(os.getppid())) != str(os.getppid()):
        sys.exit("the process that started this rank has gone")
    faulthandler.dump_traceback_later(allowed_s, exit=True)


def new_events() -> tuple[Any, Any]:
    """Return two events of the current GPU that record times."""
    event: Any = torch.cuda.Event
    return event(enable_timing=True), event(enable_timing=True)


def device_ms(call: Callable[[], object], calls: int = 1) -> float:
    """Return the time per call on the current stream, for calls back to back; wait for the last."""
    begin, end = new_events()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / calls


def captured(enqueue: Callable[[], object], pool: Any = None, beside: bool = False) -> Any:
    """Return a CUDA graph of the work that `enqueue` enqueues; it must have run once before.

    Args:
        enqueue: enqueues work on the current stream.
        pool: the pool of the graph's memory; None: one of its own.
        beside: capture on a stream of PyTorch's; other threads may call the driver meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    stream, errors = (None, "thread_local") if beside else (torch.cuda.current_stream(), "global")
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=errors):
        enqueue()
    return graph


@dataclass
class Config:
    """One way to run a case."""

    name: str
    call: Callable[[int], torch.Tensor]
    about: dict[str, Any] = field(default_factory=dict)
    graph: Any = None
    last: Any = None  # result of the last captured call; graphs of one pool share its memory
    number: int = 0

    def step(self) -> torch.Tensor:
        """Make the next call."""
        self.number += 1
        return self.call(self.number - 1)


class Timer:
    """Runs configurations on the current stream; ranks start together."""

    def __init__(self, rendezvous: Rendezvous, calls: int) -> None:
        self._rendezvous, self.calls = rendezvous, calls

    def capture(self, config: Config, pool: Any) -> None:
        """Capture a configuration's calls, which have run before, and replay them once."""
        last: list[torch.Tensor] = []

        def enqueue() -> None:
            for i in range(self.calls):
                last[:] = [config.call(i)]

        torch.cuda.synchronize()
        config.graph = captured(enqueue, pool)
        config.last = _unowned(last.pop())
        config.graph.replay()
        torch.cuda.synchronize()

    def run(self, config: Config, regime: str) -> list[float]:
        """Return milliseconds per call: one value, or one per call if synchronized."""
        beat()
        if regime == "synchronized":
            return self._synchronized(config)
        self._rendezvous.gather()
        if regime == "captured":
            return [device_ms(config.graph.replay) / self.calls]
        for _ in range(2):  # the stream must not be empty when the clock starts
            config.step()
        return [device_ms(config.step, self.calls)]

    def _synchronized(self, config: Config) -> list[float]:
        times_ms, failure = [], None
        for _ in range(SYNCHRONIZED_CALLS):
            torch.cuda.synchronize()
            self._rendezvous.gather()
            begin = time.perf_counter()
            try:
                config.step()
                torch.cuda.synchronize()
            except Exception as error:  # raised below: the other ranks still synchronize here
                failure = failure or error
            times_ms.append(1e3 * (time.perf_counter() - begin))
        if failure:
            raise failure
        return times_ms


def _unowned(result: torch.Tensor) -> torch.Tensor:
    """Return a matrix over the same memory that does not own it.

    The next capture into the pool can then reuse a graph's result; the graph keeps the pool mapped.
    Otherwise the results of all schedules of a large shape fill a GPU.
    """
    assert result.is_contiguous(), tuple(result.stride())
    rows, cols = result.shape
    dtype = str(result.dtype).removeprefix("torch.")
    return TorchDeviceCompute().at(result.data_ptr(), rows, cols, dtype)


def calls_for(call_ms: float) -> int:
    """Return the number of calls in a run: 10, fewer for very long calls; always even."""
    if call_ms < 4.0:
        return 10
    return 4 if call_ms < 20.0 else 2
