"""What `ficco doctor` finds of AMD's library and devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ficco.cli.engine_choice import MOST_GPUS, unreachable_pairs
from ficco.cli.findings import Finding
from ficco.errors import EngineError

if TYPE_CHECKING:
    from ficco.engines.hip import Capabilities

__all__ = ["amd_findings"]

_SERVES = "AMD GPUs: this version of ficco does not run on them yet"
_DEVICE = "AMD GPUs: a rank, in a later version"


def amd_findings() -> list[Finding]:
    """Check AMD's library, its devices, and whether signals between these arrive in order.

    The checks beyond the library are made only if there are devices.
    """
    try:
        from ficco.engines import hip
    except (ImportError, EngineError):
        return [Finding("HIP runtime", False, "not checked", _SERVES, "see native core")]
    try:
        count, version = hip.device_count(), hip.served_version()
    except hip.GpuError as error:
        return [Finding("HIP runtime", False, *_parts(error))]
    found = f"HIP {version}, {count} devices, {hip.library_path()}"
    findings = [Finding("HIP runtime", True, found, _SERVES)]
    devices = []
    for device in range(count):
        try:
            devices.append(hip.capabilities(device))
        except hip.GpuError as error:
            findings.append(Finding(f"AMD device {device}", False, str(error), _DEVICE))
            continue
        findings.append(_device(device, devices[-1]))
    if 1 < count == len(devices):
        findings += _pairs(devices)
    return findings


def _parts(error: Exception) -> tuple[str, str, str]:
    """Return the fields of a finding from an error, whose last part may say what to do."""
    reason, _, do = str(error).rpartition("; ")
    return (reason, _SERVES, do) if reason else (do, _SERVES, "")


def _device(number: int, here: Capabilities) -> Finding:
    """Say what a device is, and whether the package has code for it."""
    from ficco.kernels.amd_code import ARCHITECTURES

    found = (
        f"{here.name}, {here.arch}, {here.compute_units} compute units, "
        f"{here.memory_bytes / 2**30:.0f} GiB"
    )
    served = here.arch in ARCHITECTURES
    known = " or ".join(ARCHITECTURES)
    do = "" if served else f"use a device of {known}: waits are kernels, compiled for these"
    return Finding(f"AMD device {number}", served, found, _DEVICE, do)


def _pairs(devices: Sequence[Capabilities]) -> list[Finding]:
    """Check that devices reach each other, and that data and signals arrive in order."""
    serves = "several AMD GPUs, in a later version"
    peers = [here.peers for here in devices]
    if unreachable := unreachable_pairs(peers):
        return [Finding("AMD peer access", False, f"not between {unreachable}", serves)]
    findings = [Finding("AMD peer access", True, "between all pairs", serves)]
    from ficco.engines.hip import GpuError
    from ficco.engines.hip_peers import HipPeers
    from ficco.engines.peer_windows import PeerWindows
    from ficco.plan import WindowBytes

    try:
        PeerWindows(HipPeers(range(min(len(devices), MOST_GPUS))), WindowBytes()).close()
    except (EngineError, GpuError) as error:
        reason, _, do = str(error).partition("; ")
        return [*findings, Finding("AMD signals", False, reason, serves, do)]
    found = "copies of 4 bytes arrive after their data, eager and from a graph"
    return [*findings, Finding("AMD signals", True, found, serves)]
