"""What `ficco doctor` finds by probing the devices of this machine."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ficco import temporary
from ficco.cli.engine_choice import MOST_GPUS
from ficco.cli.findings import Finding
from ficco.errors import EngineError, InputError

if TYPE_CHECKING:
    from ficco.engines.peers import Peers
    from ficco.engines.probe_record import Record

__all__ = ["check_report", "probe_findings", "write_report"]

_ASKED = {
    "arrive": "all copies arrive whole",
    "engines": "copies beside kernels: they need a copy engine",
    "order": "signals come after their data",
    "release": "a wait that is stuck ends",
    "rates": "the time of copies",
}
# Variables that change what drivers do; a report has those that are set.
_OF_DRIVERS = ("AMD_", "CUDA_", "FICCO_", "GPU_", "HIP_", "HSA_", "ROC_", "ROCR_")


def probe_findings(
    vendor: str,
    peers_of: Callable[[Sequence[int]], Peers],
    count: int,
    blocked: str,
    say: Callable[[str], None],
) -> tuple[list[Finding], list[Record]]:
    """Probe devices; return a finding for each probe, and the record of all if there is one.

    Args:
        vendor: start of the findings' names.
        peers_of: opens devices by their numbers.
        count: number of devices; there are no findings of one.
        blocked: the variable that makes every launch wait for its end, or "".
        say: told what is probed next.
    """
    if count < 2:
        return [], []
    if blocked:
        found, do = f"{blocked} is set, so nothing can overlap", f"unset {blocked}"
        return [Finding(f"{vendor} probes", False, found, "several devices", do)], []
    if count > MOST_GPUS:
        say(f"probes the first {MOST_GPUS} of {count} devices")
    from ficco.engines.peer_windows import PeerWindows
    from ficco.engines.probe_record import ADVICE, probed
    from ficco.plan import WindowBytes

    try:
        peers = peers_of(range(min(count, MOST_GPUS)))
        try:
            windows = PeerWindows(peers, WindowBytes())
            signals = windows.signals
            windows.close()
            record = probed(peers, signals, again=True, say=say)
        finally:
            peers.close()
    except (EngineError, InputError, RuntimeError) as error:
        reason, _, do = str(error).partition("; ")
        return [Finding(f"{vendor} probes", False, reason, "several devices", do)], []
    findings = [
        Finding(
            f"{vendor} probe: {verdict.name}", verdict.ok, verdict.found, _ASKED[verdict.name],
            "" if verdict.ok else ADVICE[verdict.name],
        )
        for verdict in record.verdicts
    ]  # fmt: skip
    if count > MOST_GPUS:
        found = f"the first {MOST_GPUS} of {count} devices were probed"
        do = f"{peers.visible} names others"
        findings.append(Finding(f"{vendor} probes", False, found, "several devices", do))
    return findings, [record]


def check_report(path: str) -> Path:
    """Return the path for a report, after a check that the file can be created.

    Raises:
        InputError: the name does not end in .json, the file exists, or it cannot be written.
    """
    if Path(path).suffix != ".json":
        raise InputError(f"--report {path}: the file's name must end in .json")
    return temporary.check_new(path, "--report")


def write_report(
    target: Path, findings: Sequence[Finding], records: Sequence[Record],
    variables: Mapping[str, str] = os.environ,
) -> None:  # fmt: skip
    """Write all findings and records to a file, whole or not at all.

    The user's home folder is written as `~`.

    Raises:
        InputError: the file cannot be written.
    """
    document: dict[str, Any] = {
        "format": 1,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kernel": platform.release(),
        "variables": {
            name: value for name, value in sorted(variables.items()) if name.startswith(_OF_DRIVERS)
        },
        "findings": [finding._asdict() for finding in findings],
        "probes": [record.as_json() for record in records],
    }
    text, home = json.dumps(document, indent=1) + "\n", str(Path.home())
    if home != os.sep:
        text = text.replace(f"{home}{os.sep}", f"~{os.sep}")
    try:
        temporary.write_whole(target, text)
    except OSError as error:
        raise InputError(f"--report {target}: {error.strerror}") from None
