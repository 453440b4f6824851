"""Ranks that are threads of this process, as in `ficco.Node`."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import ficco
from ficco import oracle
from ficco.compute import named
from ficco.machine import Machine
from ficco.measuring.host_clock import host_us
from ficco.plan import Plan
from ficco.problem import Problem
from ficco.profiling.host.extent import Extent
from ficco.profiling.host.rig import Made, Rig, own_us, slowest
from ficco.runtime.blas_threads import single_threaded
from ficco.runtime.local import LocalRuntime
from ficco.schedule import Schedule
from ficco.timeline import Span

__all__ = ["ThreadRig"]

_CALLS = 5  # calls of a turn


class ThreadRig(Rig):
    """See `Rig`. NumPy runs the GEMMs."""

    def __init__(self, world: int, cores: int, extent: Extent) -> None:
        super().__init__(world, cores, named("numpy"), extent, "threads")
        self._arrays = [self.arrays() for _ in range(world)]
        self._runtime = LocalRuntime(world, Machine.named("host"), self.compute, timeout_s=30.0)

    def close(self) -> None:
        """See `Rig`."""
        self._runtime.close()

    def _run(self, plan: Plan, runs: int) -> list[Sequence[Span]]:
        spans: list[Sequence[Span]] = []
        for _ in range(runs):
            self._runtime.execute_plan(plan, self._arrays)
            spans.append(self._runtime.timeline().spans)
        return spans

    def least_us(self, makes: Sequence[Made]) -> list[float]:
        """See `Rig`."""
        barrier = threading.Barrier(self.active)

        def rank() -> list[float]:
            barrier.wait()
            return own_us(makes, self.extent, time.thread_time)

        with single_threaded(), ThreadPoolExecutor(self.active) as threads:
            futures = [threads.submit(rank) for _ in range(self.active)]
            return slowest([future.result() for future in futures])

    def probe_us(self, problem: Problem, schedule: Schedule) -> float:
        """See `Rig`."""
        inputs = oracle.inputs(problem, 0)
        with ficco.Node(self.world, machine="host") as node:
            run = partial(node.run, problem, inputs, schedule=schedule)
            return min(host_us(run, _CALLS) for _ in range(self.extent.probes))
