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

A killed sweep may leave half a line at the end; opening the journal drops it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ficco.errors import InputError
from ficco.reading import number, parsed_json

__all__ = ["BAD", "Journal", "Record"]

BAD = ("impossible", "failed", "wrong")
Record = Mapping[str, Any]
Runs = dict[int, float]


class Journal:
    """A journal that one process at a time can open.

    The process holds a lock on the file; the kernel releases it when the process ends.

    Args:
        path: the file; it is created if it does not exist.

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

    Raises:
        InputError: the file is in use, cannot be written, or contains something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[str, Runs] = {}
        self.screens: dict[str, Runs] = {}
        self.errors: dict[str, float] = {}
        self.bad: dict[str, Any] = {}
        self.checked: set[str] = set()
        self.worked_out: dict[str, Record] = {}
        self.parts: dict[str, dict[str, Runs]] = {}
        self.lacking: dict[str, dict[str, str]] = {}
        self.timelines: dict[tuple[str, str, str], Record] = {}
        self.touched: set[str] = set()
        self.ended: set[str] = set()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
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
        if self._known(line):
            return
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            while text:
                text = text[os.write(self._file, text) :]
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror}; earlier records are safe") from None
        self._take(line)

    def missing(self, point: str, rounds: int) -> list[int]:
        """Return the numbers of a point's missing runs."""
        done = self.runs.get(point, {})
        return [number for number in range(rounds) if number not in done]

    def _read(self) -> None:
        contents = self.path.read_bytes()
        end = contents.rfind(b"\n") + 1
        for line_number, line in enumerate(contents[:end].splitlines(), 1):
            try:
                self._take(parsed_json(line, f"line {line_number}"))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                raise InputError(
                    f"{self.path}: line {line_number} is not a record of a sweep; name another "
                    "folder, or remove the line"
                ) from None
        if end < len(contents):
            os.ftruncate(self._file, end)

    def _known(self, line: Record) -> bool:
        point = line.get("id")
        for field, recorded in (("run", self.runs), ("screen", self.screens)):
            if field in line and point is not None:
                return line[field] in recorded.get(point, {})
        if "part" in line and "bad" in line:
            return line["part"] in self.lacking.get(line["shape"], {})
        if "part" in line:
            return line["run"] in self.parts.get(line["shape"], {}).get(line["part"], {})
        if "bad" in line:
            return point in self.bad
        if "checked" in line:
            return point in self.checked
        if "predicted_ms" in line or "dil" in line:
            return self.worked_out.get(point or "", {}).items() >= line.items()
        return "ended" in line and line["shape"] in self.ended

    def _take(self, line: Record) -> None:
        shape, point = line["shape"], line.get("id", "")
        self.touched.add(shape)
        if "ended" in line:
            self.ended.add(shape)
        elif "timeline" in line:
            self.timelines[shape, line["regime"], line["which"]] = line
        elif "part" in line and "bad" in line:
            self.lacking.setdefault(shape, {}).setdefault(line["part"], str(line["bad"]))
        elif "part" in line:
            runs = self.parts.setdefault(shape, {}).setdefault(line["part"], {})
            runs.setdefault(int(line["run"]), number(line["ms"], "ms"))
        elif "checked" in line:
            self.checked.add(point)
        elif "bad" in line:
            self.bad.setdefault(point, line)
        elif "predicted_ms" in line or "dil" in line:
            self.worked_out[point] = {**self.worked_out.get(point, {}), **line}
        elif "run" in line:
            self.runs.setdefault(point, {}).setdefault(int(line["run"]), number(line["ms"], "ms"))
        elif "screen" in line:
            runs = self.screens.setdefault(point, {})
            runs.setdefault(int(line["screen"]), number(line["ms"], "ms"))
        if "error" in line:
            self.errors[point] = max(self.errors.get(point, 0.0), float(line["error"]))

    def close(self) -> None:
        """Close the file and release the lock."""
        os.close(self._file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
