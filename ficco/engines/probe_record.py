"""What probes have found of this machine's devices: measured once, kept in a file, and used.

The file's name is a hash of the driver, the devices, and ficco's version, so that any change of
these probes the devices again.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ficco import temporary
from ficco.engines.device_probes import Verdict, probe
from ficco.engines.peers import Peers
from ficco.errors import DevicesRefused
from ficco.interrupts import is_interrupt
from ficco.settings import cache_folder, switch

__all__ = ["ADVICE", "Record", "declined", "identity_of", "probed", "trusted"]

_log = logging.getLogger("ficco")
_FORMAT = 1
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


def identity_of(peers: Peers) -> dict[str, Any]:
    """Return what verdicts hold for."""
    return {"ficco": importlib.metadata.version("ficco"), **peers.identity()}


def probed(
    peers: Peers,
    signals: str,
    *,
    again: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Record:
    """Return what the probes found of these devices: read from the file, or measured now.

    Args:
        peers: two devices or more.
        signals: the kind of signals, see `ficco.engines.peer_signals`.
        again: measure in any case.
        say: told what is probed next.

    Raises:
        EngineError, GpuError: see `device_probes.probe`.
    """
    identity = identity_of(peers)
    path = _path(identity, signals)
    known = None if again else _read(path)
    if known is not None:
        return known
    found = Record(identity, datetime.date.today().isoformat(), signals, probe(peers, signals, say))
    return found._replace(path=_written(path, found))


def declined() -> bool:
    """Return whether FICCO_PROBES=0 declines the probes, and log that.

    Raises:
        InputError: FICCO_PROBES is neither 0 nor 1.
    """
    if switch("FICCO_PROBES", True):
        return False
    _log.warning("FICCO_PROBES=0: the devices are used without the probes of `ficco doctor`")
    return True


def trusted(peers: Peers, signals: str) -> str:
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


def _path(identity: Mapping[str, Any], signals: str) -> Path:
    key = json.dumps([_FORMAT, identity, signals], sort_keys=True)
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    return cache_folder() / f"probes-{name}.json"


def _read(path: Path) -> Record | None:
    """Return a record from its file; None if there is none, or it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        verdicts = [Verdict(**fields) for fields in found["verdicts"]]
        return Record(found["identity"], found["date"], found["signals"], verdicts, path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if is_interrupt(error):
            raise
        _log.warning("%s cannot be read (%s); the devices are probed again", path, error)
        return None


def _written(path: Path, record: Record) -> Path | None:
    """Write a record; return its file if that worked."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_whole(path, json.dumps(record.as_json(), indent=1) + "\n")
    except OSError as error:
        if is_interrupt(error):
            raise
        _log.warning("%s cannot be written (%s); the next use probes again", path, error)
        return None
    return path
