"""Progress of a sweep on stderr: a bar with the remaining time on a terminal, else lines."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column


def _whole(columns: int) -> Column:
    """Return a column that a narrow terminal does not cut."""
    return Column(no_wrap=True, min_width=columns)


class Progress:
    """Shows the progress of a sweep. A context manager: the bar is shown while it is open.

    Args:
        shapes: number of shapes of the whole sweep.
    """

    def __init__(self, shapes: int) -> None:
        self._shapes, self._ended, self._runs = shapes, 0, 0
        self._started, self._at_start, self._done = time.monotonic(), 0, 0
        name = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # it alone may be cut
        self._bar = Bar(
            TextColumn("{task.description}", table_column=name),
            BarColumn(10, table_column=_whole(10)),
            MofNCompleteColumn(table_column=_whole(len("1000/1000"))),
            TextColumn("runs,", table_column=_whole(len("runs,"))),
            TimeRemainingColumn(table_column=_whole(len("0:00:00"))),
            TextColumn("left", table_column=_whole(len("left"))),
            console=Console(stderr=True), expand=True, disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self._task = self._bar.add_task("sweep", total=0)

    def begin(self, runs: int, ended: int, done: int) -> None:
        """Start with the amount of work.

        Args:
            runs: runs of the whole sweep, if no point turns out bad.
            ended: shapes that are complete.
            done: finished runs.
        """
        self._runs, self._ended, self._done, self._at_start = runs, ended, done, done
        self._started = time.monotonic()
        if done:
            self.say(f"continues: {ended} of {self._shapes} shapes are complete")
        self._show("sweep")

    def run(self, shape: str, count: int = 1) -> None:
        """Add finished runs."""
        self._done += count
        self._show(shape)

    def ended(self, shape: str) -> None:
        """Report that a shape is complete."""
        self._ended += 1
        if self._bar.disable:
            self.say(f"{self._ended} of {self._shapes}: {shape}{self._left()}")
        self._show(shape)

    def say(self, text: str) -> None:
        """Print a line."""
        line = f"ficco sweep: {text}"
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=self._bar.disable)

    def _left(self) -> str:
        runs = self._done - self._at_start
        if not runs or self._done >= self._runs:
            return ""
        seconds = (time.monotonic() - self._started) / runs * (self._runs - self._done)
        return f", about {seconds:.0f} s left"

    def _show(self, about: str) -> None:
        done = min(self._done, self._runs)
        self._bar.update(self._task, total=self._runs, completed=done, description=about)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
