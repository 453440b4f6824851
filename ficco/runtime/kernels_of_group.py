"""Which of ficco's own kernels all ranks of a group can have; all ranks say the same."""

from __future__ import annotations

from ficco.engines.group_kernels import GroupKernels
from ficco.kernels import fallback, pack
from ficco.runtime.process import ProcessRuntime

__all__ = ["kernels_of"]


def kernels_of(runtime: ProcessRuntime) -> GroupKernels:
    """Return what a group's ranks can have. A collective call on the group."""
    found = runtime.gathered(_facts())
    compiles = not any(uncompiled for _, uncompiled, _ in found)
    for rank, (unused, uncompiled, _) in enumerate(found):
        if unused and not compiles:  # what the pack of one rank lacks, another one cannot compile
            why = uncompiled or next(each for _, each, _ in found if each)
            return GroupKernels(f"rank {rank}: {unused}, and {why}", False, ())
    gpus = tuple(sorted({tuple(gpu) for *_, gpu in found}))
    (mine, _), packed = found[runtime.rank][2], not any(unused for unused, *_ in found)
    return GroupKernels("", compiles, gpus, mine, packed)


def _facts() -> tuple[str, str, tuple[int, int]]:
    """Return why this rank has no pack, why it compiles nothing, and its GPU."""
    import torch

    from ficco.engines import cuda

    device = torch.cuda.current_device()
    facts = cuda.capabilities(device)
    capability = 10 * facts.major + facts.minor
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return pack.why_not(capability), fallback.why_not(), (capability, processors)
