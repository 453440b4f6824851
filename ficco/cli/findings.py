"""The results of checks of `ficco doctor`: of probes, of AMD devices, and what follows."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ficco.cli.engine_choice import MOST_GPUS, unreachable_pairs
from ficco.core import files
from ficco.core.errors import EngineError, InputError, counted
from ficco.core.private.frameworks import FRAMEWORKS, objects_of, why_old

_Result = TypeVar("_Result")

if TYPE_CHECKING:
    from ficco.engine.gpus import Gpus
    from ficco.engine.hip import Capabilities
    from ficco.engine.probe_record import Record


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        name: of the check.
        ok: whether what was looked for is there.
        found: what there is.
        serves: what it is used for.
        do: what to do if it is not there.
    """

    name: str
    ok: bool
    found: str
    serves: str
    do: str = ""

    @classmethod
    def failed(cls, name: str, error: Exception, serves: str, otherwise: str = "") -> Finding:
        """Return the finding of an error, which says after a semicolon what to do."""
        reason, _, do = str(error).partition("; ")
        return cls(name, False, reason, serves, do or otherwise)


def devices_of(
    vendor: Any, count: int, name: str, about: Callable[[Any], tuple[bool, str, str]]
) -> tuple[list[Finding], list[Any]]:
    """Return a finding of each device by `about`, and the capabilities of those that have any."""
    findings, devices, serves = [], [], "a rank"
    for device in range(count):
        try:
            devices.append(vendor.capabilities(device))
        except vendor.GpuError as error:
            findings.append(Finding(f"{name} {device}", False, str(error), serves))
            continue
        ok, found, do = about(devices[-1])
        findings.append(Finding(f"{name} {device}", ok, found, serves, do))
    return findings, devices


def peer_access(name: str, devices: Sequence[Any], serves: str, do: str) -> Finding:
    """Check that devices, by their capabilities, reach each other; `do`: if they do not."""
    if unreachable := unreachable_pairs([here.peers for here in devices]):
        return Finding(name, False, f"not between {unreachable}", serves, do)
    return Finding(name, True, "between all pairs", serves)


def on_devices(vendor: Any, count: int, use: Callable[[Gpus, str], _Result]) -> _Result:
    """Return what `use` returns of the first devices, and of the signals that arrive on them."""
    from ficco.engine.gpus import Gpus
    from ficco.engine.peer_windows import PeerWindows
    from ficco.plan import WindowBytes

    gpus = Gpus(vendor, range(min(count, MOST_GPUS)))
    try:
        windows = PeerWindows(gpus, WindowBytes())
        windows.close()
        return use(gpus, windows.signals)
    finally:
        gpus.close()


_OVERLAP = ("peer access", "signals", "CUDA settings", "torch on GPUs")  # what GPUs need besides


def framework_findings(say: Callable[[str], None]) -> list[Finding]:
    """Import the installed frameworks, and look for the names that ficco needs of them."""
    findings = []
    for framework in FRAMEWORKS:
        release = installed(framework.distribution)
        if release is None:
            do = f"pip install {framework.distribution}, if you use it"
            findings.append(Finding(framework.name, False, "not installed", framework.way, do))
            continue
        found = f"{release} (tested: {framework.tested})"
        wrong = why_old(framework, release)
        if not wrong and framework.names:
            say(f"imports {framework.name}")
            try:
                _, missing = objects_of(framework)
                wrong = f"it has no {', '.join(missing)}" if missing else ""
                found += "" if missing else f", all {len(framework.names)} names found"
            except Exception as error:  # whatever its import raises
                wrong = f"its import raises {type(error).__name__}: {error}"
        do = "ficco leaves its layers unchanged; install the tested release" if wrong else ""
        text = f"{found}; {wrong}" if wrong else found
        findings.append(Finding(framework.name, not wrong, text, framework.way, do))
    return findings


def installed(distribution: str) -> str | None:
    """Return the release of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def unusable(findings: Sequence[Finding]) -> list[Finding]:
    """Return what keeps ficco from running here at all."""
    return [f for f in findings if f.serves.startswith("everything") and not f.ok]


def verdict(findings: Sequence[Finding]) -> str:
    """Return in one sentence what ficco does on this machine, and what to do first."""
    if lacking := unusable(findings):
        return f"ficco cannot run here: {_reason(lacking[0])}"
    if any(f.name.startswith("AMD device ") for f in findings):
        return (
            "ficco runs on CPUs; on AMD GPUs it has never run: send the file that --report writes"
        )
    gpus = sum(f.ok for f in findings if f.name.startswith("GPU "))
    if not gpus:
        return "ficco runs on the CPUs of this machine; it finds no GPU that it can use"
    if gpus == 1:
        return "ficco runs on CPUs, and has nothing to overlap on one GPU: two are needed"
    if lacking := [f for f in findings if f.name in _OVERLAP and not f.ok]:
        return f"nothing overlaps on these {gpus} GPUs: {_reason(lacking[0])}"
    ready = f"ficco overlaps on these {counted(gpus, 'GPU')}"
    if lacking := [f for f in findings if f.name.startswith("profile, ") and not f.ok]:
        return f"{ready}, but `auto` cannot choose for them: {_reason(lacking[0])}"
    return f"{ready}, and `auto` chooses by a profile of them"


def _reason(finding: Finding) -> str:
    return f"{finding.name}: {finding.found}{finding.do and '; ' + finding.do}"


# ---- probes

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
    name: str,
    vendor: Any,
    count: int,
    blocked: str,
    say: Callable[[str], None],
) -> tuple[list[Finding], list[Record]]:
    """Probe devices; return a finding for each probe, and the record of all if there is one.

    Args:
        name: start of the findings' names.
        vendor: `ficco.engine.cuda` or `ficco.engine.hip`.
        count: number of devices; there are no findings of one.
        blocked: the variable that makes every launch wait for its end, or "".
        say: told what is probed next.
    """
    if count < 2:
        return [], []
    if blocked:
        found, do = f"{blocked} is set, so nothing can overlap", f"unset {blocked}"
        return [Finding(f"{name} probes", False, found, "several devices", do)], []
    if count > MOST_GPUS:
        say(f"probes the first {MOST_GPUS} of {count} devices")
    from ficco.engine.probe_record import ADVICE, probed

    try:
        record = on_devices(vendor, count, partial(probed, again=True, say=say))
    except (EngineError, InputError, RuntimeError) as error:
        return [Finding.failed(f"{name} probes", error, "several devices")], []
    findings = [
        Finding(
            f"{name} probe: {verdict.name}", verdict.ok, verdict.found, _ASKED[verdict.name],
            "" if verdict.ok else ADVICE[verdict.name],
        )
        for verdict in record.verdicts
    ]  # fmt: skip
    if count > MOST_GPUS:
        found = f"the first {MOST_GPUS} of {count} devices were probed"
        do = f"{vendor.VISIBLE} names others"
        findings.append(Finding(f"{name} probes", False, found, "several devices", do))
    return findings, [record]


def check_report(path: str) -> Path:
    """Return the path for a report, after a check that the file can be created.

    Raises:
        InputError: the name does not end in .json, the file exists, or it cannot be written.
    """
    if Path(path).suffix != ".json":
        raise InputError(f"--report {path}: the file's name must end in .json")
    return files.check_new(path, "--report")


def write_report(target: Path, findings: Sequence[Finding], records: Sequence[Record]) -> None:
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
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_OF_DRIVERS)
        },
        "findings": [finding._asdict() for finding in findings],
        "probes": [record.as_json() for record in records],
    }
    text, home = json.dumps(document, indent=1) + "\n", str(Path.home())
    if home != os.sep:
        text = text.replace(f"{home}{os.sep}", f"~{os.sep}")
    try:
        files.write(target, text)
    except OSError as error:
        raise InputError(f"--report {target}: {error.strerror}") from None


# ---- AMD

_SERVES = "AMD GPUs, on which ficco has never run; please report what this command says"


def amd_findings(
    probes: bool = True, say: Callable[[str], None] = lambda text: None
) -> tuple[list[Finding], list[Record]]:
    """Check AMD's library and its devices, and probe these.

    Args:
        probes: whether to probe several devices, which other work on them waits for.
        say: told what is probed next.
    """
    try:
        from ficco.engine import hip
    except (ImportError, EngineError):
        return [Finding("HIP runtime", False, "not checked", _SERVES, "see native core")], []
    _load_torch()
    try:
        count, version = hip.device_count(), hip.served_version()
    except hip.GpuError as error:
        return [Finding("HIP runtime", False, *_parts(error))], []
    found = f"HIP {version}, {count} devices, {hip.library_path()}"
    own, devices = devices_of(hip, count, "AMD device", _device)
    findings = [Finding("HIP runtime", True, found, _SERVES), *own]
    records: list[Record] = []
    if 1 < count == len(devices):
        do = "use devices that XGMI or one PCIe switch connects, named by HIP_VISIBLE_DEVICES"
        findings.append(peer_access("AMD peer access", devices, "several AMD GPUs", do))
    if probes and all(finding.ok for finding in findings):
        verdicts, records = probe_findings("AMD", hip, count, hip.blocked_by(), say)
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


def _device(here: Capabilities) -> tuple[bool, str, str]:
    """Say what a device is, and whether the package has code for it."""
    from ficco.kernels.amd_code import ARCHITECTURES

    found = (
        f"{here.name}, {here.arch}, {here.compute_units} compute units, "
        f"{here.memory_bytes / 2**30:.0f} GiB"
    )
    served = here.arch in ARCHITECTURES
    known = " or ".join(ARCHITECTURES)
    do = f"use a device of {known}: waits are kernels, compiled for these"
    return served, found, "" if served else do
