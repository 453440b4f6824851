"""Probes of a group's GPUs before their first use; all ranks get the same answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ficco.errors import DevicesRefused, EngineError, InputError

if TYPE_CHECKING:
    from ficco.runtime.process import ProcessRuntime

__all__ = ["trusted_gpus"]


def trusted_gpus(runtime: ProcessRuntime, devices: Sequence[int], signals: str) -> str:
    """Return why copies do not overlap with kernels on the GPUs of a group; "" if they do.

    Only AMD's GPUs are probed: NVIDIA's were measured. Rank 0 opens all devices; the other ranks
    wait for it. If rank 0 cannot probe them, nothing overlaps. A collective call on the group.

    Args:
        runtime: of the group.
        devices: number of each rank's device.
        signals: the kind of signals.

    Raises:
        DevicesRefused: results could be wrong, or calls could hang. All ranks raise it.
        InputError: FICCO_PROBES is neither 0 nor 1. All ranks raise it.
    """
    if torch.version.hip is None or runtime.world == 1:
        return ""
    answer = _answer(sorted(set(devices)), signals) if runtime.rank == 0 else None
    kind, text = runtime.gathered(answer)[0]
    if kind == "refused":
        raise DevicesRefused(text)
    if kind == "input":
        raise InputError(text)
    return str(text)


def _answer(devices: Sequence[int], signals: str) -> tuple[str, str]:
    from ficco.engines.hip import GpuError
    from ficco.engines.hip_peers import HipPeers
    from ficco.engines.probe_record import trusted

    if len(devices) == 1:
        return "slow", "all ranks share one device"
    try:
        peers = HipPeers(devices)
        try:
            return "", trusted(peers, signals)
        finally:
            peers.close()
    except DevicesRefused as error:
        return "refused", str(error)
    except InputError as error:
        return "input", str(error)
    except (EngineError, GpuError) as error:
        return "slow", f"the devices cannot be probed: {error}"
