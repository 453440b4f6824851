"""The journal: what was measured, a line of JSON each, written as it comes. Nothing is judged here.

    {"id", "run": n, "ms", "error"}           a timed run; error: of its result, if it was checked
    {"id", "screen": n, "ms"}                 a run by which points are chosen for the timed ones
    {"id", "error"}                           a result that was checked, of an untimed call
    {"id", "checked": true}                   its result was checked again, after its timed runs
    {"id", "bad": reason, "kind"}             a point that has no figures; kind: one of BAD
    {"id", "predicted_ms", "dil", "cil"}      what was worked out for it
    {"shape", "part", "run": n, "ms"}         a part of a shape alone: "gemm", or a transfer
    {"shape", "part", "bad": reason}          a part, pieces of a schedule or a trace: not to be had
    {"shape", "regime", "which", "id", "timeline"}
    {"shape", "ended": true}                  nothing is missing any more

A sweep that is killed may leave half a line at the end; it is dropped when the journal is opened.
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
    """A journal under one lock: of two processes that open it the second is refused.

    The lock is the file's own and goes with the process, however that ends.

    Args:
        path: made if it is not there.

    Attributes:
        runs, screens: ms by point and number.
        errors: the largest error of a point's results.
        bad: per point why it has no figures.
        checked: points whose results were checked again after their runs.
        worked_out: per point what was worked out for it.
        parts: ms by shape, part and number.
        lacking: by shape and part why it is not to be had.
        timelines: by shape, regime and "best" or "worst".
        touched, ended: shapes of which something is known, and of which nothing is missing.

    Raises:
        InputError: it is in use, cannot be written, or holds something else.
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
        """Write a record of a shape down, then take it in. A record about what is known is dropped.

        Args:
            shape: the shape's id, which stands in every line.
            record: as the head of this file has it.

        Raises:
            InputError: it cannot be written.
        """
        line = {"shape": shape, **record}
        if self._known(line):
            return
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            while text:
                text = text[os.write(self._file, text) :]
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror}; nothing before it is lost") from None
        self._take(line)

    def missing(self, point: str, rounds: int) -> list[int]:
        """Return the numbers of a point's runs that are still to be made."""
        done = self.runs.get(point, {})
        return [number for number in range(rounds) if number not in done]

    def _read(self) -> None:
        whole = self.path.read_bytes()
        end = whole.rfind(b"\n") + 1
        for at, line in enumerate(whole[:end].splitlines(), 1):
            try:
                self._take(parsed_json(line, f"line {at}"))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                raise InputError(
                    f"{self.path}: line {at} is no line of a sweep's; name another folder, or "
                    "remove the line"
                ) from None
        if end < len(whole):
            os.ftruncate(self._file, end)

    def _known(self, line: Record) -> bool:
        point = line.get("id")
        for field, held in (("run", self.runs), ("screen", self.screens)):
            if field in line and point is not None:
                return line[field] in held.get(point, {})
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
        """Give the lock back."""
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
