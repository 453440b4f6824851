"""Ranks that are processes of a torch.distributed group, as in calls of the torch functions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ficco import oracle, settings
from ficco.compute import named
from ficco.errors import EngineError
from ficco.interrupts import is_interrupt
from ficco.machine import Machine
from ficco.measuring.host_clock import host_us
from ficco.plan import Plan
from ficco.problem import Problem
from ficco.profiling.host.extent import Extent
from ficco.profiling.host.rig import Made, Rig, own_us, slowest
from ficco.runtime.blas_threads import single_threaded
from ficco.runtime.object_exchange import gathered_objects
from ficco.runtime.process import ProcessRuntime
from ficco.schedule import Schedule
from ficco.timeline import Span

__all__ = ["ProcessRig", "joined"]

Caller = Callable[[ProcessRuntime, Problem, Schedule], Callable[[], object]]

_CALLS = 5  # calls of a turn
_TIMEOUT_S = 60.0  # timeout of a plan, on a machine that may be busy


@contextmanager
def joined() -> Iterator[Any]:
    """Join the group of a command's ranks, as the environment describes it; yield the group."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['FICCO_STORE']}", rank=settings.whole("RANK"),
        world_size=settings.whole("WORLD_SIZE"),
    )  # fmt: skip
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
        caller: returns, for a runtime and a problem, a function that makes the call; None: use
            `execute`.
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
        caller: Caller | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        import torch.distributed as dist

        super().__init__(dist.get_world_size(group), cores, named(compute), extent, "processes")
        self._rank, self._caller = dist.get_rank(group), caller
        self._arrays = self.arrays()
        self._runtime = ProcessRuntime(group, Machine.named("host"), self.compute, timeout_s)

    def close(self) -> None:
        """See `Rig`."""
        self._runtime.close()

    def gathered(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank; values are objects of any size."""
        return gathered_objects(self._runtime, value)

    def _run(self, plan: Plan, runs: int) -> list[Sequence[Span]]:
        def measure() -> list[Sequence[Span]]:
            runs_spans: list[Sequence[Span]] = []
            for _ in range(runs):
                self._runtime.execute_plan(plan, self._arrays)
                runs_spans.append(self._runtime.timeline().spans)
            return runs_spans

        ranks = self._gathered(measure)
        return [[span for spans in each for span in spans] for each in zip(*ranks, strict=True)]

    def least_us(self, makes: Sequence[Made]) -> list[float]:
        """See `Rig`."""

        def measure() -> list[float]:
            if self._rank >= self.active:
                return []
            with single_threaded():
                return own_us(makes, self.extent, time.process_time)

        self._runtime.gathered(None)  # start together
        return slowest(self._gathered(measure)[: self.active])

    def probe_us(self, problem: Problem, schedule: Schedule) -> float:
        """See `Rig`."""

        def measure() -> list[float]:
            run = (self._caller or _execute)(self._runtime, problem, resolved)
            return [host_us(run, _CALLS) for _ in range(self.extent.probes)]

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


def _execute(runtime: ProcessRuntime, problem: Problem, schedule: Schedule) -> Callable[[], object]:
    """Return a function that makes a call on a runtime, without the torch functions' checks."""
    arrays = dict(oracle.inputs(problem, 0)[runtime.rank])
    for number, shape in enumerate(problem.result_shapes(runtime.rank)):
        arrays[f"y{number}"] = np.empty(shape, np.float32)
    return lambda: runtime.execute(problem, schedule, arrays)
