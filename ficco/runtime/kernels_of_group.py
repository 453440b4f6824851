"""Which of ficco's own kernels all ranks of a group can load; all ranks get the same answer."""

from __future__ import annotations

from ficco.engines.group_kernels import GroupKernels
from ficco.kernels import fallback, pack
from ficco.runtime.process import OPENING_S, ProcessRuntime

__all__ = ["kernels_of"]


_NOT_FOR_AMD = "on AMD GPUs there is only a gated gather, whose tiles are not tuned"


def kernels_of(runtime: ProcessRuntime) -> GroupKernels:
    """Return the kernels that all ranks of a group can load. A collective call on the group.

    If it raises an error, the runtime is closed, so that its peers do not wait.
    """
    try:
        facts = runtime.gathered(_facts(), least_s=OPENING_S)  # a rank may import Triton first
    except BaseException:
        runtime.close()
        raise
    compiles = not any(uncompiled for _, uncompiled, _ in facts)
    for rank, (unpacked, uncompiled, _) in enumerate(facts):
        if unpacked and not compiles:  # one rank has no pack, and one cannot compile
            why = uncompiled or next(reason for _, reason, _ in facts if reason)
            both = unpacked if why == unpacked else f"{unpacked}, and {why}"
            return GroupKernels(f"rank {rank}: {both}", False, ())
    gpus = tuple(sorted({tuple(gpu) for *_, gpu in facts}))
    (capability, _), packed = facts[runtime.rank][2], not any(unpacked for unpacked, *_ in facts)
    return GroupKernels("", compiles, gpus, capability, packed)


def _facts() -> tuple[str, str, tuple[int, int]]:
    """Return why this rank has no pack, why it cannot compile, and its GPU."""
    import torch

    from ficco.engines import cuda

    device = torch.cuda.current_device()
    if torch.version.hip is not None:
        return _NOT_FOR_AMD, _NOT_FOR_AMD, (0, 1)
    facts = cuda.capabilities(device)
    capability = 10 * facts.major + facts.minor
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return pack.why_not(capability), fallback.why_not(), (capability, processors)
