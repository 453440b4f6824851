"""Which of ficco's own kernels all ranks of a group can have; all ranks say the same."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ficco.engines import cuda
from ficco.engines.wanted import DescribedKernels, missing
from ficco.kernels import fallback, pack
from ficco.lowering import lower_rank
from ficco.problem import Problem
from ficco.schedule import Schedule

__all__ = ["GroupKernels", "kernels_of"]


class GroupKernels(NamedTuple):
    """What a group's ranks can have.

    Attributes:
        reason: why they can have no kernels; "": they can.
        compiles: whether every rank can compile what the pack lacks.
        gpus: compute capability and multiprocessors of the ranks' GPUs, each pair once.
    """

    reason: str
    compiles: bool
    gpus: tuple[tuple[int, int], ...]

    def serve(self, problem: Problem, schedule: Schedule) -> bool:
        """Return whether all ranks can have the kernels of a call.

        What each rank finds in the pack is worked out for all ranks, so all come to one answer.
        """
        own = schedule.compute == "gated" or schedule.transport == "sm"
        if schedule.transport == "collective" or not own:
            return True
        if self.reason:
            return False
        return self.compiles or _in_pack(problem, schedule, self.gpus)


@lru_cache(maxsize=1024)
def _in_pack(
    problem: Problem, schedule: Schedule, gpus: tuple[tuple[int, int], ...]
) -> bool:  # fmt: skip
    for capability, processors in gpus:
        kernels = DescribedKernels(capability, processors)
        for rank in range(problem.world):
            if missing(lower_rank(problem, schedule, rank), kernels):
                return False
    return True


def kernels_of(group: Any) -> GroupKernels:
    """Return what a group's ranks can have. A collective call on the group."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, _facts(), group=group)
    for rank, (unused, uncompiled, _) in enumerate(found):
        if unused and uncompiled:
            return GroupKernels(f"rank {rank}: {unused}, and {uncompiled}", False, ())
    gpus = tuple(sorted({gpu for *_, gpu in found}))
    return GroupKernels("", not any(uncompiled for _, uncompiled, _ in found), gpus)


def _facts() -> tuple[str, str, tuple[int, int]]:
    """Return why this rank has no pack, why it compiles nothing, and its GPU."""
    device = torch.cuda.current_device()
    facts = cuda.capabilities(device)
    capability, uncompiled = 10 * facts.major + facts.minor, fallback.why_not()
    processors = 0  # of no use where all can be compiled
    if uncompiled:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return pack.why_not(capability), uncompiled, (capability, processors)
