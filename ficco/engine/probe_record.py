"""What probes have found of this machine's devices: measured once, kept in a file, and used.

The file's name is a hash of the driver, the devices, and ficco's version, so that any change of
these probes the devices again.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ficco.core.cache import Kept
from ficco.core.errors import DevicesRefused, InputError
from ficco.core.reading import parsed_json, table
from ficco.core.settings import cache_folder, switch
from ficco.engine.device_probes import NAMES, Verdict, probe
from ficco.engine.gpus import Gpus

_log = logging.getLogger("ficco")
_FORMAT = 1
_BEGINS = r'\{\s*"format": \d+,\s*"identity": '  # of every file of verdicts
_NEEDED = ("arrive", "order", "release")  # without these, results may be wrong or calls hang

ADVICE = {
    "arrive": "update the driver; until then ficco refuses AMD devices",
    "engines": (
        "update the driver (ROCm: copies of kind NoCU use SDMA for every size since "
        "rocm-systems pull requests 683 and 9100); until then schedule='auto' is serial on AMD "
        "devices, because copies cannot overlap with kernels"
    ),
    "order": "update the driver; until then ficco refuses AMD devices",
    "release": "update the driver; until then ficco refuses AMD devices",
    "rates": "look for a slow link, or for memory that the driver takes for local (rocm-systems "
    "issue 9472)",
}  # fmt: skip


class Record(NamedTuple):
    """The verdicts of a machine's devices.

    Attributes:
        identity: of the devices, the driver and ficco.
        date: when they were probed.
        signals: the kind of signals.
        verdicts: of all probes.
        path: the file that keeps them; None if it could not be written.
    """

    identity: Mapping[str, Any]
    date: str
    signals: str
    verdicts: Sequence[Verdict]
    path: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the record as JSON."""
        return {
            "format": _FORMAT,
            "identity": dict(self.identity),
            "date": self.date,
            "signals": self.signals,
            "verdicts": [verdict._asdict() for verdict in self.verdicts],
        }


def identity_of(peers: Gpus) -> dict[str, Any]:
    """Return what verdicts hold for."""
    return {"ficco": importlib.metadata.version("ficco"), **peers.vendor.identity(peers.devices)}


def probed(
    peers: Gpus,
    signals: str,
    *,
    again: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Record:
    """Return what the probes found of these devices: read from the file, or measured now.

    Args:
        peers: two devices or more.
        signals: the kind of signals, see `ficco.engine.peer_signals`.
        again: measure in any case.
        say: told what is probed next.

    Raises:
        EngineError, GpuError: see `device_probes.probe`.
    """
    identity = identity_of(peers)
    kept = Kept.of(cache_folder(), "probes-*.json", [_FORMAT, identity, signals], _BEGINS)
    known = None if again else kept.read(_parsed, _damaged)
    if known is not None:
        return known._replace(path=kept.path)
    found = Record(identity, datetime.date.today().isoformat(), signals, probe(peers, signals, say))
    text = json.dumps(found.as_json(), indent=1) + "\n"
    return found._replace(path=kept.write(text, _unwritten))


def declined() -> bool:
    """Return whether FICCO_PROBES=0 declines the probes, and log that.

    Raises:
        InputError: FICCO_PROBES is neither 0 nor 1.
    """
    if switch("FICCO_PROBES", True):
        return False
    _log.warning("FICCO_PROBES=0: the devices are used without the probes of `ficco doctor`")
    return True


def trusted(peers: Gpus, signals: str) -> str:
    """Probe devices before their first use; return why nothing overlaps on them, or "".

    FICCO_PROBES=0 declines: nothing is probed, and the devices are trusted.

    Raises:
        DevicesRefused: results could be wrong, or calls could hang. It names the probe.
        InputError: FICCO_PROBES is neither 0 nor 1.
        EngineError, GpuError: see `device_probes.probe`.
    """
    if declined():
        return ""
    record = probed(peers, signals)
    failed = {verdict.name: verdict for verdict in record.verdicts if not verdict.ok}
    for name in _NEEDED:
        if name in failed:
            raise DevicesRefused(
                f"the probe {name!r} of the devices failed: {failed[name].found}; {ADVICE[name]}; "
                f"{_again(record)}`ficco doctor --report FILE.json` writes what to report"
            )
    if "engines" in failed:
        return f"the probe 'engines' of the devices failed: {failed['engines'].found}"
    return ""


def _again(record: Record) -> str:
    """Return how the devices are probed again, if the verdicts are kept in a file."""
    return f"remove {record.path} to probe them again; " if record.path else ""


def _parsed(text: bytes, name: str) -> Record:
    """Return a record from the contents of its file."""
    found = parsed_json(text, name)
    kinds = {"format": int, "identity": dict, "date": str, "signals": str, "verdicts": list}
    table(found, kinds, name, kinds)
    kinds = {"name": str, "ok": bool, "found": str, "numbers": dict}
    verdicts = [Verdict(**table(each, kinds, name, kinds)) for each in found["verdicts"]]
    if [verdict.name for verdict in verdicts] != [*NAMES]:
        raise InputError(f"{name}: verdicts of {', '.join(NAMES)} are needed, each once")
    return Record(found["identity"], found["date"], found["signals"], verdicts)


_damaged = partial(_log.warning, "%s cannot be read (%s); the devices are probed again")
_unwritten = partial(_log.warning, "%s cannot be written (%s); the next use probes again")
