"""Check whether the GPUs of a group can run ficco's engine; all ranks get the same answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ficco.engines import cuda, hip
from ficco.errors import InputError
from ficco.private.torch_core import symmetric_memory
from ficco.runtime.members import members_of
from ficco.runtime.rendezvous import Rendezvous

__all__ = ["facts_of_gpu", "here", "ordinal", "reason_of", "vendor", "why_not"]


def why_not(group: Any, timeout_s: float = 300.0) -> str | None:
    """Return why the GPUs of a group cannot run ficco's engine; None if they can.

    A collective call on the group; all ranks get the same answer.

    Args:
        group: a ProcessGroup with the nccl backend.
        timeout_s: the longest time to wait for all ranks, in seconds.

    Raises:
        InputError: a rank has no GPU.
        EngineError: the ranks are on several hosts, or one has died; TimeoutExceeded: a rank did
            not arrive.
    """
    rendezvous = Rendezvous(members_of(group, "nccl"), {}, timeout_s)
    try:
        return reason_of(rendezvous.gather("compare GPUs", facts_of_gpu(), timeout_s))
    finally:
        rendezvous.close()


def reason_of(facts_by_rank: Sequence[dict[str, Any]]) -> str | None:
    """Return why GPUs with these facts, by rank, cannot run ficco's engine; None if they can.

    Raises:
        InputError: a rank has no GPU.
    """
    for rank, facts in enumerate(facts_by_rank):
        if facts["device"] is None:
            raise InputError(
                f"rank {rank}: the group is opened for GPUs, but PyTorch finds none on this rank "
                f"({facts['reason']}); use machine='host' and tensors of the CPU"
            )
    devices = {facts["device"] for facts in facts_by_rank}
    for rank, facts in enumerate(facts_by_rank):
        if facts["reason"] is not None:
            return f"rank {rank}: {facts['reason']}"
        unreached = sorted(other for other in devices if other in facts["unreached"])
        if unreached:
            return f"rank {rank}: device {facts['device']} has no peer access to {unreached}"
    return None


def facts_of_gpu() -> dict[str, Any]:
    """Return this rank's device, the devices that it cannot reach, and why it cannot run, if so.

    Devices are named by number: the ranks must see the same devices, or one device each.
    """
    facts: dict[str, Any] = {"device": None, "unreached": [], "reason": None}
    try:
        facts["device"] = ordinal()
    except (AssertionError, RuntimeError) as error:  # no CUDA build, no driver or no GPU
        facts["reason"] = str(error).splitlines()[0]
        return facts
    try:
        peers = vendor().capabilities(facts["device"]).peers
        facts["unreached"] = [i for i, reached in enumerate(peers) if not reached]
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
    """Return the module for the devices of this build of PyTorch: cuda or hip of `engines`."""
    return cuda if torch.version.hip is None else hip


def here() -> torch.device:
    """Return the current device."""
    return torch.device("cuda", torch.cuda.current_device())


def ordinal() -> int:
    """Return the number of the current device; the driver and PyTorch number devices alike."""
    return torch.cuda.current_device()
