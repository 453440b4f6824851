"""A sweep's folder: its head and the surroundings in it, its ownership, and atomic writes."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ficco.cli.sweeping.journal import Journal
from ficco.core import files
from ficco.core.errors import InputError, shown
from ficco.core.reading import parsed_json, table

VERSION = 1
HEAD, JOURNAL = "sweep.json", "runs.jsonl"
RESULTS, TABLE, BOOK = "results.jsonl", "results.csv", "book.toml"
_BEGINS = {  # of each file, by its name
    HEAD: r'\{\s*"version": ',
    RESULTS: r'\{"kind": "shape", ',
    TABLE: "op,m,n,k,dtype,world,regime,name,grain,ms,",
    BOOK: "# Written by ficco sweep",
}
_TYPES = {  # of those fields of the head that are used
    "grid": str, "how": str, "machine": dict, "ficco": str, "driver": str, "date": str,
    "profile": str, "paced": bool, "world": int, "points": int, "gpus": list, "assumptions": list,
}  # fmt: skip
# Fields of the head that may differ between two runs of one sweep.
_FREE = ("date", "about", "assumptions", "grid")


def replaced(path: Path, text: str) -> None:
    """Write a file of a sweep's folder whole, in the place of an earlier one.

    Raises:
        InputError: the file cannot be written, or a sweep has not written the earlier one.
    """
    try:
        files.write(path, text, _BEGINS[path.name])
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def read_head(folder: Path) -> dict[str, Any]:
    """Read the head of a sweep's folder.

    Raises:
        InputError: the folder is not a sweep's, or another ficco wrote it.
    """
    path = folder / HEAD
    try:
        text = files.read(path)
    except OSError as error:
        raise InputError(
            f"{str(folder)!r} is not a sweep's folder: {HEAD} in it cannot be read "
            f"({error.strerror}); give the folder that `ficco sweep --out` wrote"
        ) from None
    head = parsed_json(text, f"{path}, which is not a sweep's or is damaged,")
    version = head.get("version") if isinstance(head, dict) else None
    if version != VERSION:
        raise InputError(
            f"{path}: version {shown(version)} found, this ficco reads {VERSION}; the file is not "
            "a sweep's, or another ficco wrote it"
        )
    used = {name: value for name, value in head.items() if name in _TYPES and value is not None}
    table(used, _TYPES, str(path), ("grid", "how", "machine", "ficco"))
    named = [used["machine"].get("name", "")]
    named += [gpu["name"] if isinstance(gpu, Mapping) and "name" in gpu else gpu
              for gpu in used.get("gpus", ())]  # fmt: skip
    for name in named:
        if not isinstance(name, str):
            raise InputError(f"{path}: {shown(name)}: the name of a machine or a GPU is needed")
    checked: dict[str, Any] = head
    return checked


def opened(folder: Path, head: Mapping[str, Any]) -> tuple[Journal, dict[str, Any]]:
    """Open a new or an existing folder for a sweep; return its journal and its head.

    Raises:
        InputError: it contains something else or another sweep, is in use, or cannot be written.
    """
    try:
        files.make_folder(folder)
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise InputError(f"--out {folder}: {error.strerror}; name another folder") from None
    names = [name for name in names if not name.startswith(files.PARTIAL)]  # of a killed sweep
    if HEAD not in names and set(names) - {JOURNAL}:
        contents = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise InputError(
            f"--out {folder}: it contains something else ({contents}); name a new folder, or a "
            "sweep's folder"
        )
    if HEAD in names:
        _check_same(folder, head)
    journal = Journal(folder / JOURNAL)
    try:
        if not (folder / HEAD).exists():
            if journal.touched:
                raise InputError(f"--out {folder}: it has runs, but no {HEAD}; name another folder")
            replaced(folder / HEAD, json.dumps(head, indent=1) + "\n")
        _check_same(folder, head)
        return journal, read_head(folder)
    except InputError:
        journal.close()
        raise


def _check_same(folder: Path, head: Mapping[str, Any]) -> None:
    """Refuse a folder of another grid, machine or version."""
    existing = read_head(folder)
    differences = [
        f"{field} was {_brief(existing.get(field))}, is {_brief(head.get(field))}"
        for field in head
        if field not in _FREE and existing.get(field) != head.get(field)
    ]
    if differences:
        raise InputError(
            f"--out {folder}: it contains the sweep {existing.get('grid')!r} of "
            f"{shown(existing.get('date'))}, which cannot continue: {'; '.join(differences)}. Name "
            "another folder"
        )


def _brief(value: Any) -> str:
    if isinstance(value, Mapping) and "name" in value:
        value = value["name"]
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


# ---- the surroundings of a measurement

_QUERIED = ("name", "driver_version", "power.limit", "clocks.max.sm")


def surroundings() -> dict[str, Any]:
    """Return machine, versions and date, which every result contains."""
    model = platform.processor() or "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "versions": {"python": platform.python_version(), **_versions("ficco", "numpy", "torch")},
    }


def gpus() -> dict[str, Any]:
    """Return nvidia-smi's description of the GPUs, and the versions of GPU packages."""
    versions = _versions("triton", "nvidia-nccl-cu13", "cuda-bindings")
    try:
        command = ["nvidia-smi", f"--query-gpu={','.join(_QUERIED)}", "--format=csv,noheader"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        rows = [[word.strip() for word in line.split(",")] for line in result.stdout.splitlines()]
        return {"gpus": [dict(zip(_QUERIED, row, strict=True)) for row in rows], "more": versions}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {"gpus": [], "gpus_missing": str(error), "more": versions}


def _versions(*packages: str) -> dict[str, str]:
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
