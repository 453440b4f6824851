"""Ranks that are the processes of a torch.distributed group, as the torch functions have them."""

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
from ficco.machine import Machine
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

_CALLS = 5  # of a turn
_TIMEOUT_S = 60.0  # for a plan, on a machine that may be busy


@contextmanager
def joined() -> Iterator[Any]:
    """Join the ranks that a command has started, as their environment says; yield their group."""
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
    """See `Rig`. All ranks of the group make one, and each of its calls together.

    Its windows are its own, so that those of the group stay as they are.

    Args:
        group: a ProcessGroup with the gloo backend.
        cores, extent: as of `Rig`.
        compute: name of the library for GEMMs.
        caller: makes, of a runtime and a call, what is run to make it; None: `execute`.
        timeout_s: how long ranks wait for one another.

    Raises:
        EngineError: some rank failed; on all of them.
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

    def told(self, mine: Any) -> list[Any]:
        """Return what every rank brings, by rank: objects, which may be large."""
        return gathered_objects(self._runtime, mine)

    def _run(self, plan: Plan, runs: int) -> list[Sequence[Span]]:
        def mine() -> list[Sequence[Span]]:
            found: list[Sequence[Span]] = []
            for _ in range(runs):
                self._runtime.execute_plan(plan, self._arrays)
                found.append(self._runtime.timeline().spans)
            return found

        ranks = self._gathered(mine)
        return [[span for spans in each for span in spans] for each in zip(*ranks, strict=True)]

    def least_us(self, makes: Sequence[Made]) -> list[float]:
        """See `Rig`."""

        def mine() -> list[float]:
            if self._rank >= self.active:
                return []
            with single_threaded():
                return own_us(makes, self.extent, time.process_time)

        self._runtime.gathered(None)  # begin together
        return slowest(self._gathered(mine)[: self.active])

    def probe_us(self, problem: Problem, schedule: Schedule) -> float:
        """See `Rig`."""

        def mine() -> list[float]:
            run = (self._caller or _execute)(self._runtime, problem, resolved)
            turns = []
            for _ in range(self.extent.probes):
                begin = time.perf_counter()
                for _ in range(_CALLS):
                    run()
                turns.append(1e6 * (time.perf_counter() - begin) / _CALLS)
            return turns

        resolved = schedule.resolve(self.world, self._runtime.machine)
        return min(slowest(self._gathered(mine)))

    def _gathered(self, mine: Callable[[], Any]) -> list[Any]:
        """Return what every rank has found, or raise on all of them what one has raised."""
        try:
            found = mine()
        except Exception as error:
            found = EngineError(f"rank {self._rank}: {error}")
        ranks = self.told(found)
        if failed := [each for each in ranks if isinstance(each, EngineError)]:
            raise failed[0]
        return ranks


def _execute(runtime: ProcessRuntime, problem: Problem, schedule: Schedule) -> Callable[[], object]:
    """Return what makes a call on a runtime, without the checks of the torch functions."""
    given = dict(oracle.inputs(problem, 0)[runtime.rank])
    for number, shape in enumerate(problem.result_shapes(runtime.rank)):
        given[f"y{number}"] = np.empty(shape, np.float32)
    return lambda: runtime.execute(problem, schedule, given)
