"""A result that grows entry by entry, and the processes that measure its entries.

A failure may end the processes. Then the entry and the way that they had begun are recorded, and
new processes measure what is left, without that way.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ficco.measure.launching import run_ranks

__all__ = ["STARTS", "START_S", "Supervised", "exit_in_order"]

STARTS = 4  # most starts of the processes, if they fail
START_S = 25.0  # approximate time to start them; with less time left, nothing starts


def exit_in_order() -> None:
    """Let signals that end this process raise SystemExit, so that no rank keeps running."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))


class Supervised:
    """A result in a file, which rank 0 of the processes extends.

    Rank 0 appends lines of JSON to `said.jsonl` in the folder of the processes: {"begin": [entry,
    way]}, {"group": facts}, and {entry_kind: entry}.

    Args:
        path: of the result.
        document: its content, with the lists `entry_kind` + "s" and "failed".
        entry_kind: the name of an entry, such as "cell".
        way_kind: the name of what is compared in an entry, such as "variant".
        told: returns the text to print for an entry.
        end: the time when processes are ended, by `time.time`.
    """

    def __init__(
        self, path: Path, document: dict[str, Any], entry_kind: str, way_kind: str,
        told: Callable[[dict[str, Any]], str], end: float,
    ) -> None:  # fmt: skip
        self.path, self.document, self.end = path, document, end
        self.entry_kind, self.way_kind, self._told = entry_kind, way_kind, told
        self.skipped: dict[str, dict[str, str]] = {}  # reasons by entry and way
        self.begun: tuple[str, str] | None = None
        self._read = 0

    @property
    def done(self) -> set[str]:
        """The names of the entries that are measured."""
        return {entry[self.entry_kind] for entry in self.document[self.entry_kind + "s"]}

    def write(self) -> None:
        """Rewrite the result."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.document, indent=1) + "\n")
        part.replace(self.path)

    def start(self, script: str, world: int, options: list[str], todo: dict[str, Any]) -> str:
        """Measure in new processes; return why they failed, or an empty string.

        Args:
            script: run on every rank, with `--rank-of FOLDER` added.
            world: number of ranks.
            options: of the script.
            todo: written to `todo.json` in the folder.
        """
        self._read, self.begun = 0, None
        with tempfile.TemporaryDirectory(prefix=Path(script).stem) as name:
            folder = Path(name)
            (folder / "todo.json").write_text(json.dumps(todo | {"skipped": self.skipped}))
            command, left = [script, *options, "--rank-of", name], max(self.end - time.time(), 1.0)
            return run_ranks(command, world, folder, left, lambda: self._watch(folder))

    def failed(self, reason: str, entry: str, way: str) -> tuple[str, str, str]:
        """Record a failure; return the entry and the way that had begun, and why they are skipped.

        `entry` and `way` name the failure if nothing had begun.
        """
        print(reason, file=sys.stderr, flush=True)
        entry, way = self.begun or (entry, way)
        self.document["failed"].append(
            {self.entry_kind: entry, self.way_kind: way, "reason": reason}
        )
        self.write()
        return entry, way, f"ended its process in {entry}: {reason}"[:1500]

    def _watch(self, folder: Path) -> None:
        """Process rank 0's new reports."""
        path = folder / "said.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        for line in lines[self._read :]:
            for kind, value in json.loads(line).items():
                if kind == "begin":
                    self.begun = (value[0], value[1])
                elif kind == "group":
                    self.begun, self.document["group"] = None, value
                elif kind == self.entry_kind:
                    self.begun = None
                    self.document[kind + "s"].append(value)
                    print(self._told(value), file=sys.stderr, flush=True)
                    self.write()
        self._read = len(lines)
