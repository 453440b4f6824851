"""Check whether a group's GPUs can run the engine, and which kernels; all ranks agree on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch

from ficco.core.errors import InputError
from ficco.core.private.torch_core import symmetric_memory
from ficco.engine import cuda, hip
from ficco.engine.group_kernels import GroupKernels
from ficco.kernels import fallback, pack
from ficco.runtime.object_exchange import Visit
from ficco.runtime.process import LOADING_S, ProcessRuntime

# The variable of PyTorch by which ranks may share a GPU, for tests.
_SHARES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_MEET_S = 300.0  # the longest time to wait for all ranks
_NOT_FOR_AMD = "on AMD GPUs there is only a gated gather, whose tiles are not tuned"


def why_not(group: Any) -> str | None:
    """Return why the GPUs of a group cannot run ficco's engine; None if they can.

    A collective call on the group; all ranks get the same answer.

    Args:
        group: a ProcessGroup with the nccl backend.

    Raises:
        InputError: a rank has no GPU.
        EngineError: the ranks are on several hosts, or one has died; TimeoutExceeded: a rank did
            not arrive.
    """
    with closing(Visit(group, "compare GPUs", "nccl", _MEET_S)) as visit:
        return reason_of(visit.gathered("compare GPUs", facts_of_gpu()))


def reason_of(facts_by_rank: Sequence[dict[str, Any]]) -> str | None:
    """Return why GPUs with these facts, by rank, cannot run ficco's engine; None if they can.

    Raises:
        InputError: a rank has no GPU, or two ranks use the same one.
    """
    for rank, facts in enumerate(facts_by_rank):
        if facts["device"] is None:
            raise InputError(
                f"rank {rank}: the group is opened for GPUs, but PyTorch finds none on this rank "
                f"({facts['reason']}); use machine='host' and tensors of the CPU"
            )
    _check_distinct([facts["pci"] for facts in facts_by_rank])
    devices = {facts["device"] for facts in facts_by_rank}
    for rank, facts in enumerate(facts_by_rank):
        if facts["reason"] is not None:
            return f"rank {rank}: {facts['reason']}"
        unreached = sorted(other for other in devices if other in facts["unreached"])
        if unreached:
            return f"rank {rank}: device {facts['device']} has no peer access to {unreached}"
    return None


def _check_distinct(pci: Sequence[Any]) -> None:
    """Raise InputError, on all ranks, if two ranks use one GPU, which PyTorch does not support."""
    if torch.version.hip is not None or os.environ.get(_SHARES, "") == "1":
        return
    for rank, place in enumerate(pci):
        if place is not None and (first := pci.index(place)) != rank:
            raise InputError(
                f"ranks {first} and {rank} use the same GPU ({place}); give each rank one of its "
                "own: call torch.cuda.set_device(local_rank) before ficco's first call, for "
                "example with int(os.environ['LOCAL_RANK']) under torchrun"
            )


def facts_of_gpu() -> dict[str, Any]:
    """Return this rank's device, its place, those that it cannot reach, and why it cannot run.

    Devices are named by number: the ranks must see the same devices, or one device each.
    """
    facts: dict[str, Any] = {"device": None, "pci": None, "unreached": [], "reason": None}
    try:
        facts["device"] = ordinal()
    except (AssertionError, RuntimeError) as error:  # no CUDA build, no driver or no GPU
        facts["reason"] = str(error).splitlines()[0]
        return facts
    try:
        found = vendor().capabilities(facts["device"])
        facts["pci"] = found.pci
        facts["unreached"] = [i for i, reached in enumerate(found.peers) if not reached]
    except cuda.GpuError as error:
        facts["reason"] = str(error)
        return facts
    if name := vendor().blocked_by():
        facts["reason"] = f"{name} is set, so nothing can overlap"
        return facts
    if torch.version.hip is not None:
        facts["reason"] = hip.why_no_windows(facts["device"]) or None
        return facts
    try:
        symmetric_memory().empty(16, dtype=torch.uint8, device=here())
    except Exception as error:  # PyTorch raises several types on a machine without it
        facts["reason"] = f"PyTorch has no symmetric memory here: {error}"
    return facts


def vendor() -> Any:
    """Return the module for the devices of this build of PyTorch: cuda or hip of `engine`."""
    return cuda if torch.version.hip is None else hip


def here() -> torch.device:
    """Return the current device."""
    return torch.device("cuda", torch.cuda.current_device())


def ordinal() -> int:
    """Return the number of the current device; the driver and PyTorch number devices alike."""
    return torch.cuda.current_device()


def kernels_of(runtime: ProcessRuntime) -> GroupKernels:
    """Return the kernels that all ranks of a group can load. A collective call on the group.

    If it raises an error, the runtime is closed, so that its peers do not wait.
    """
    try:
        facts = runtime.gathered("compare kernels", _facts_of_kernels(), least_s=LOADING_S)
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


def _facts_of_kernels() -> tuple[str, str, tuple[int, int]]:
    """Return why this rank has no pack, why it cannot compile, and its GPU."""
    if torch.version.hip is not None:
        return _NOT_FOR_AMD, _NOT_FOR_AMD, (0, 1)
    facts = cuda.capabilities(ordinal())
    capability = 10 * facts.major + facts.minor
    processors = torch.cuda.get_device_properties(ordinal()).multi_processor_count
    return pack.why_not(capability), fallback.why_not(), (capability, processors)
