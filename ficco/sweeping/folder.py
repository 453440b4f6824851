"""A sweep's folder: its head, its ownership, and atomic writes of its files."""

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
# Fields of the head that may differ between two runs of one sweep.
_FREE = ("date", "about", "assumptions", "grid")


def replaced(path: Path, text: str) -> None:
    """Write a file atomically.

    Raises:
        InputError: the file cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def read_head(folder: Path) -> dict[str, Any]:
    """Read the head of a sweep's folder.

    Raises:
        InputError: the folder is not a sweep's, or a newer ficco wrote it.
    """
    try:
        head = parsed_json((folder / HEAD).read_bytes(), str(folder / HEAD))
        version = head["version"]
    except FileNotFoundError:
        raise InputError(f"{folder}: it has no {HEAD}; this is not a sweep's folder") from None
    except OSError as error:
        raise InputError(f"{folder / HEAD}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{folder / HEAD}: this is not the head of a sweep") from None
    if version != VERSION:
        raise InputError(f"{folder}: its format is {version}, this ficco reads {VERSION}")
    checked: dict[str, Any] = head
    return checked


def opened(folder: Path, head: Mapping[str, Any]) -> tuple[Journal, dict[str, Any]]:
    """Open a new or an existing folder for a sweep; return its journal and its head.

    Raises:
        InputError: it contains something else or another sweep, is in use, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise InputError(f"--out {folder}: {error.strerror}; name another folder") from None
    if HEAD not in names and set(names) - {JOURNAL, f".{HEAD}.part"}:
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
            f"{existing.get('date')}, which cannot continue: {'; '.join(differences)}. Name "
            "another folder"
        )


def _brief(value: Any) -> str:
    if isinstance(value, Mapping) and "name" in value:
        value = value["name"]
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
