"""The journal: one JSON line per measurement, written at once. It does not evaluate results.

    {"id", "run": n, "ms", "error"}           a timed run; error: of its result, if it was checked
    {"id", "screen": n, "ms"}                 a screening run; these select points for timed runs
    {"id", "error"}                           the checked result of an untimed call
    {"id", "checked": true}                   the result was checked again after the timed runs
    {"id", "bad": reason, "kind"}             a point without figures; kind: one of BAD
    {"id", "predicted_ms", "dil", "cil"}      figures computed for the point
    {"shape", "part", "run": n, "ms"}         a part of a shape alone: "gemm", or a transfer
    {"shape", "part", "bad": reason}          a missing part, pieces of a schedule, or a trace
    {"shape", "regime", "which", "id", "timeline"}
    {"shape", "ended": true}                  nothing is missing any more

A killed sweep may leave half a line at the end; opening the journal drops it. A file that contains
anything else is refused, and stays as it is.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ficco.core import files
from ficco.core.errors import InputError, shown
from ficco.core.reading import number, parsed_json, table

BAD = ("impossible", "failed", "wrong")
Record = Mapping[str, Any]
Runs = dict[int, float]
_FIELDS = {
    "shape": str, "id": str, "run": int, "screen": int, "ms": float, "part": str, "bad": object,
    "kind": str, "checked": bool, "ended": bool, "regime": str, "which": str, "timeline": dict,
    "predicted_ms": float, "dil": float, "cil": float, "error": float,
}  # fmt: skip
_BEGINS = b'{"shape":"'  # of every record


@dataclass
class Records:
    """The records of a sweep, of which a rank has a copy.

    Attributes:
        runs, screens: ms by point and number.
        errors: the largest error of a point's results.
        bad: by point, why it has no figures.
        checked: points whose results were checked again after their runs.
        worked_out: by point, the figures computed for it.
        parts: ms by shape, part and number.
        lacking: by shape and part, why the part is missing.
        timelines: by shape, regime and "best" or "worst".
        touched, ended: shapes with any record, and shapes that are complete.
    """

    runs: dict[str, Runs] = field(default_factory=dict)
    screens: dict[str, Runs] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    bad: dict[str, Any] = field(default_factory=dict)
    checked: dict[str, bool] = field(default_factory=dict)
    worked_out: dict[str, Record] = field(default_factory=dict)
    parts: dict[str, dict[str, Runs]] = field(default_factory=dict)
    lacking: dict[str, dict[str, str]] = field(default_factory=dict)
    timelines: dict[tuple[str, str, str], Record] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    ended: dict[str, bool] = field(default_factory=dict)

    def copied(self) -> Records:
        """Return them for a rank, without the tables of timelines."""
        records = Records(**{each.name: getattr(self, each.name) for each in fields(Records)})
        return replace(records, timelines={key: {} for key in self.timelines})

    def missing(self, point: str, rounds: int) -> list[int]:
        """Return the numbers of a point's missing runs."""
        done = self.runs.get(point, {})
        return [number for number in range(rounds) if number not in done]

    def has(self, line: Record) -> bool:
        """Return whether a record is known."""
        if "predicted_ms" in line or "dil" in line:
            return self.worked_out.get(line.get("id", ""), {}).items() >= line.items()
        entries, key, _ = self._entry(line)
        return "timeline" not in line and key in entries

    def take(self, line: Record) -> None:
        """Add a record."""
        point = line.get("id", "")
        self.touched.add(line["shape"])
        if "predicted_ms" in line or "dil" in line:
            self.worked_out[point] = {**self.worked_out.get(point, {}), **line}
        else:
            entries, key, value = self._entry(line)
            entries.setdefault(key, value)
        if "error" in line:
            self.errors[point] = max(self.errors.get(point, 0.0), float(line["error"]))

    def _entry(self, line: Record) -> tuple[dict[Any, Any], Any, Any]:
        """Return the entries that a record belongs to, its key among them, and its value."""
        shape, point = line["shape"], line.get("id", "")
        if "ended" in line:
            return self.ended, shape, True
        if "timeline" in line:
            return self.timelines, (shape, line["regime"], line["which"]), line
        if "part" in line and "bad" in line:
            return self.lacking.setdefault(shape, {}), line["part"], str(line["bad"])
        if "part" in line:
            runs = self.parts.setdefault(shape, {}).setdefault(line["part"], {})
            return runs, int(line["run"]), number(line["ms"], "ms")
        if "checked" in line:
            return self.checked, point, True
        if "bad" in line:
            return self.bad, point, line
        for kind, recorded in (("run", self.runs), ("screen", self.screens)):
            if kind in line:
                return recorded.setdefault(point, {}), int(line[kind]), number(line["ms"], "ms")
        return {}, "", None  # the error of an untimed call, or nothing that is used


class Journal(Records):
    """A journal that one process at a time can open.

    The process holds a lock on the file; the kernel releases it when the process ends.

    Args:
        path: the file; it is created if it does not exist.

    Raises:
        InputError: the file is in use, cannot be written, or contains something else.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        try:
            self._file = files.open_to_append(path)
        except OSError as error:
            raise InputError(
                f"{path}: {error.strerror}; name a folder that can be written"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise InputError(
                f"{path.parent}: another sweep is running there; wait for its end, or name another "
                "folder"
            ) from None
        try:
            self._read()
        except InputError:
            self.close()
            raise

    def append(self, shape: str, **record: Any) -> None:
        """Write a shape's record to the file and add it to the attributes, unless it is known.

        Args:
            shape: the shape's id, which is part of every line.
            record: the fields, as listed at the top of this file.

        Raises:
            InputError: the record cannot be written.
        """
        line = {"shape": shape, **record}
        if self.has(line):
            return
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            while text:
                text = text[os.write(self._file, text) :]
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror}; earlier records are safe") from None
        self.take(line)

    def _read(self) -> None:
        try:
            contents = files.read(self.path, files.SWEEP_BYTES)
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror}; name another folder") from None
        end = contents.rfind(b"\n") + 1
        for line_number, line in enumerate(contents[:end].splitlines(), 1):
            try:
                self.take(_checked(parsed_json(line, f"line {line_number}")))
            except (InputError, KeyError):
                raise InputError(
                    f"{self.path}: line {line_number} is not a record of a sweep; name another "
                    "folder, or remove the line"
                ) from None
        if torn := contents[end:]:
            if torn[: len(_BEGINS)] != _BEGINS[: len(torn)]:
                raise InputError(
                    f"{self.path}: its end is not the beginning of a record of a sweep; name "
                    "another folder, or remove the end"
                )
            os.ftruncate(self._file, end)

    def close(self) -> None:
        """Close the file and release the lock."""
        os.close(self._file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked(line: Any) -> Record:
    """Return a record, after a check that its fields have their types.

    Raises:
        InputError: it is no record.
    """
    if not isinstance(line, dict):
        raise InputError(f"{shown(line)} is not a record")
    needed = ("shape", "id", "regime", "which") if "timeline" in line else ("shape",)
    finite = {
        field: value
        for field, value in line.items()
        if value is not None and not (field == "error" and isinstance(value, float))
    }
    table(finite, _FIELDS, "record", needed)
    record: Record = line
    return record
