"""Which of ficco's own kernels all ranks of a group can have; all ranks say the same."""

from __future__ import annotations

from typing import Any

from ficco.engines.wanted import GroupKernels
from ficco.kernels import fallback, pack

__all__ = ["kernels_of"]


def kernels_of(group: Any) -> GroupKernels:
    """Return what a group's ranks can have. A collective call on the group."""
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, _facts(), group=group)
    for rank, (unused, uncompiled, _) in enumerate(found):
        if unused and uncompiled:
            return GroupKernels(f"rank {rank}: {unused}, and {uncompiled}", False, ())
    gpus = tuple(sorted({gpu for *_, gpu in found}))
    return GroupKernels("", not any(uncompiled for _, uncompiled, _ in found), gpus)


def _facts() -> tuple[str, str, tuple[int, int]]:
    """Return why this rank has no pack, why it compiles nothing, and its GPU."""
    import torch

    from ficco.engines import cuda

    device = torch.cuda.current_device()
    facts = cuda.capabilities(device)
    capability, uncompiled = 10 * facts.major + facts.minor, fallback.why_not()
    processors = 0  # of no use where all can be compiled
    if uncompiled:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return pack.why_not(capability), uncompiled, (capability, processors)
