"""A sweep's folder: its head, whose it is, and files that are whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ficco.errors import InputError
from ficco.reading import parsed_json
from ficco.sweeping.journal import Journal

__all__ = ["HEAD", "JOURNAL", "VERSION", "opened", "read_head", "replaced"]

VERSION = 1
HEAD, JOURNAL = "sweep.json", "runs.jsonl"
RESULTS, TABLE, BOOK = "results.jsonl", "results.csv", "book.toml"
# What may differ between two runs of one sweep.
_FREE = ("date", "about", "assumptions", "grid")


def replaced(path: Path, text: str) -> None:
    """Write a file, whole or not at all.

    Raises:
        InputError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def read_head(folder: Path) -> dict[str, Any]:
    """Return what a folder's head says.

    Raises:
        InputError: it is no sweep's folder, or a newer ficco's.
    """
    try:
        head = parsed_json((folder / HEAD).read_bytes(), str(folder / HEAD))
        version = head["version"]
    except FileNotFoundError:
        raise InputError(f"{folder}: it has no {HEAD}; it is no sweep's folder") from None
    except OSError as error:
        raise InputError(f"{folder / HEAD}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{folder / HEAD}: it is no head of a sweep") from None
    if version != VERSION:
        raise InputError(f"{folder}: its format is {version}, this ficco knows {VERSION}")
    found: dict[str, Any] = head
    return found


def opened(folder: Path, head: Mapping[str, Any]) -> tuple[Journal, dict[str, Any]]:
    """Open a folder for a sweep, a new one or one that goes on; return its journal and its head.

    Raises:
        InputError: it holds something else or another sweep, is in use, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise InputError(f"--out {folder}: {error.strerror}; name another folder") from None
    if HEAD not in names and set(names) - {JOURNAL, f".{HEAD}.part"}:
        found = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise InputError(
            f"--out {folder}: it holds something else ({found}); name a new folder, or one that a "
            "sweep has made"
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
    """Refuse a folder that another grid, machine or version has filled."""
    there = read_head(folder)
    apart = [
        f"{field} was {_brief(there.get(field))}, is {_brief(head.get(field))}"
        for field in head
        if field not in _FREE and there.get(field) != head.get(field)
    ]
    if apart:
        raise InputError(
            f"--out {folder}: it holds the sweep {there.get('grid')!r} of {there.get('date')}, "
            f"which cannot go on here: {'; '.join(apart)}. Name another folder"
        )


def _brief(value: Any) -> str:
    if isinstance(value, Mapping) and "name" in value:
        value = value["name"]
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
