"""Run a benchmark of this folder with a process per GPU, and write its result."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from naming import machine_name
from record import gpus, surroundings

from ficco.measure.launching import NO_MULTICAST, run_ranks

__all__ = ["FOUND", "keep", "measured"]

FOUND = "found.json"  # which rank 0 writes into the folder of the ranks
_MORE_S = 90.0  # for the start and the end of the ranks


def measured(script: str, options: Sequence[str], world: int, seconds: float) -> dict[str, Any]:
    """Run a script on every rank, with `--rank-of FOLDER` added; return what rank 0 found.

    Args:
        script: path of the script.
        options: of its command line.
        world: number of ranks.
        seconds: the time for which the ranks measure.

    Raises:
        SystemExit: rank 0 has found nothing; the message says why.
    """
    with tempfile.TemporaryDirectory(prefix=Path(script).stem) as name:
        command = [script, *options, "--rank-of", name]
        reason = run_ranks(command, world, Path(name), seconds + _MORE_S, lambda: None)
        found = Path(name, FOUND)
        if not found.exists():
            raise SystemExit(f"{Path(script).name} has measured nothing: {reason}")
        result: dict[str, Any] = json.loads(found.read_text())
        return result


def keep(name: str, bench: str, world: int, fields: dict[str, Any], folder: str) -> dict[str, Any]:
    """Write a result and its surroundings as NAME_MACHINE.json into a folder; return all."""
    about, devices = surroundings(), gpus()
    about["versions"] |= devices.pop("more")
    document = {
        "bench": bench, **about, **devices, "world": world, "environment": NO_MULTICAST, **fields
    }  # fmt: skip
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder, f"{name}_{machine_name(document)}.json")
    path.write_text(json.dumps(document, indent=1) + "\n")
    return document
