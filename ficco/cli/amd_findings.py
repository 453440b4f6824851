"""What `ficco doctor` finds of AMD's library and devices."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ficco.cli.engine_choice import unreachable_pairs
from ficco.cli.findings import Finding
from ficco.cli.probe_findings import probe_findings
from ficco.errors import EngineError

if TYPE_CHECKING:
    from ficco.engines.hip import Capabilities
    from ficco.engines.probe_record import Record

__all__ = ["amd_findings"]

_SERVES = "AMD GPUs, on which ficco has never run; please report what this command says"
_DEVICE = "a rank"


def amd_findings(
    probes: bool = True, say: Callable[[str], None] = lambda text: None
) -> tuple[list[Finding], list[Record]]:
    """Check AMD's library and its devices, and probe these.

    Args:
        probes: whether to probe several devices, which other work on them waits for.
        say: told what is probed next.
    """
    try:
        from ficco.engines import hip
    except (ImportError, EngineError):
        return [Finding("HIP runtime", False, "not checked", _SERVES, "see native core")], []
    _load_torch()
    try:
        count, version = hip.device_count(), hip.served_version()
    except hip.GpuError as error:
        return [Finding("HIP runtime", False, *_parts(error))], []
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
    records: list[Record] = []
    if 1 < count == len(devices):
        findings.append(_pairs(devices))
    if probes and all(finding.ok for finding in findings):
        from ficco.engines.hip_peers import HipPeers

        verdicts, records = probe_findings("AMD", HipPeers, count, hip.blocked_by(), say)
        findings += verdicts
    return findings, records


def _load_torch() -> None:
    """Import PyTorch, if it is there: it loads the driver's library that its calls use."""
    if importlib.util.find_spec("torch") is None:
        return
    try:
        importlib.import_module("torch")
    except (ImportError, OSError):  # _torch_on_gpus reports it
        return


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


def _pairs(devices: Sequence[Capabilities]) -> Finding:
    """Check that devices reach each other."""
    serves = "several AMD GPUs"
    if unreachable := unreachable_pairs([here.peers for here in devices]):
        do = "use devices that XGMI or one PCIe switch connects, named by HIP_VISIBLE_DEVICES"
        return Finding("AMD peer access", False, f"not between {unreachable}", serves, do)
    return Finding("AMD peer access", True, "between all pairs", serves)
