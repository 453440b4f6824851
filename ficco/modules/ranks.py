"""This process as one rank of a command: it joins the group, runs, and agrees with the others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from ficco import compute as computes
from ficco.compute import dtype_of
from ficco.errors import InputError
from ficco.machine import Machine
from ficco.problem import Problem
from ficco.runtime.process import ProcessRuntime
from ficco.schedule import Schedule
from ficco.timeline import Timeline

__all__ = ["RankExecutor"]


class RankExecutor:
    """One rank; its environment says which (RANK, WORLD_SIZE, and FICCO_STORE or torchrun's).

    Attributes:
        ranks: this process's rank alone.
        leads: whether it is rank 0.
    """

    def __init__(self, world: int, machine: Machine, compute: str, timeout_s: float) -> None:
        found = int(os.environ["WORLD_SIZE"])
        if found != world:
            raise InputError(f"--ranks {world}, but {found} processes were started")
        store = os.environ.get("FICCO_STORE")
        if store is not None:
            rank = int(os.environ["RANK"])
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world
            )
        else:
            dist.init_process_group("gloo")
        self._runtime = ProcessRuntime(
            dist.group.WORLD, machine, computes.named(compute), timeout_s
        )
        self.ranks: Sequence[int] = [self._runtime.rank]
        self.leads = self._runtime.rank == 0

    def run(
        self, problem: Problem, given: Sequence[Mapping[str, Any]], schedule: Schedule
    ) -> list[list[Any]]:
        """Return this rank's outputs."""
        rank = self._runtime.rank
        dtype = dtype_of(problem.dtype)
        ys = [np.empty(shape, dtype) for shape in problem.result_shapes(rank)]
        arrays = {**given[rank], **{f"y{i}": y for i, y in enumerate(ys)}}
        self._runtime.execute(problem, schedule, arrays)
        return [ys]

    def meet(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def most(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all ranks."""
        gathered: list[Any] = [None] * self._runtime.world
        dist.all_gather_object(gathered, list(values))
        return [max(column) for column in zip(*gathered, strict=True)]

    def timeline(self) -> Timeline:
        """Return this rank's last run."""
        return self._runtime.timeline()

    def joined(self, timeline: Timeline) -> Timeline:
        """Return the timeline of all ranks, whose clocks are one host's."""
        gathered: list[Any] = [None] * self._runtime.world
        dist.all_gather_object(gathered, timeline)
        return Timeline.joined(gathered)

    def close(self) -> None:
        """Leave the group."""
        self._runtime.close()
        dist.destroy_process_group()
