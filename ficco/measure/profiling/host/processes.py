"""Ranks that are processes of a torch.distributed group, as in calls of the torch functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ficco.core.errors import EngineError
from ficco.core.interrupts import is_interrupt
from ficco.core.machine import Machine
from ficco.engine.compute import named
from ficco.measure import host_us
from ficco.measure.launching import join
from ficco.measure.profiling.host.rig import CALLS, Extent, Made, Rig, own_us, slowest
from ficco.operators.problem import Problem
from ficco.plan import Plan
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import Span
from ficco.runtime.engine import single_threaded
from ficco.runtime.object_exchange import gathered_objects
from ficco.runtime.process import ProcessRuntime

Caller = Callable[[ProcessRuntime, Problem, Schedule], Callable[[], object]]


@contextmanager
def joined() -> Iterator[Any]:
    """Join the group of a command's ranks, as the environment describes it; yield the group."""
    import torch.distributed as dist

    join("gloo")
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class ProcessRig(Rig):
    """See `Rig`. Creation and all methods are collective over the group.

    The rig has its own windows; those of the group are not changed.

    Args:
        group: a ProcessGroup with the gloo backend.
        cores, extent: see `Rig`.
        compute: name of the library for GEMMs.
        caller: returns, for a runtime and a problem, a function that makes the call.
        timeout_s: longest wait of ranks for one another, in seconds.

    Raises:
        EngineError: a rank failed; all ranks raise it.
    """

    def __init__(
        self,
        group: Any,
        cores: int,
        compute: str,
        extent: Extent,
        caller: Caller,
        timeout_s: float,
    ) -> None:
        import torch.distributed as dist

        super().__init__(dist.get_world_size(group), cores, named(compute), extent, "processes")
        self._rank, self._caller = dist.get_rank(group), caller
        self._arrays = self.arrays()
        self._runtime = ProcessRuntime(group, Machine.named("host"), self.compute, timeout_s)

    def gathered(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank; values are objects of any size."""
        return gathered_objects(self._runtime, "measure the host", value)

    def _run(self, plan: Plan, runs: int) -> list[Sequence[Span]]:
        ranks = self._gathered(partial(super()._run, plan, runs))
        return [[span for spans in each for span in spans] for each in zip(*ranks, strict=True)]

    def least_us(self, makes: Sequence[Made]) -> list[float]:
        """See `Rig`."""

        def measure() -> list[float]:
            if self._rank >= self.active:
                return []
            with single_threaded():
                return own_us(makes, self.extent, time.process_time)

        self._runtime.gathered("measure the host", None)  # start together
        return slowest(self._gathered(measure)[: self.active])

    def probe_us(self, problem: Problem, schedule: Schedule) -> float:
        """See `Rig`."""

        def measure() -> list[float]:
            run = self._caller(self._runtime, problem, resolved)
            return [host_us(run, CALLS) for _ in range(self.extent.probes)]

        resolved = schedule.resolve(self.world, self._runtime.machine)
        return min(slowest(self._gathered(measure)))

    def _gathered(self, measure: Callable[[], Any]) -> list[Any]:
        """Return every rank's result; if a rank raised an error, raise it on all ranks."""
        try:
            result = measure()
        except Exception as error:
            if is_interrupt(error):
                raise
            result = EngineError(f"rank {self._rank}: {error}")
        ranks = self.gathered(result)
        if errors := [result for result in ranks if isinstance(result, EngineError)]:
            raise errors[0]
        return ranks
