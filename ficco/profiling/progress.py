"""Progress of a measurement on stderr: one line a part, with its seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Progress"]


class Progress:
    """Tells what was measured and how long it took.

    Args:
        tells: whether it does; one rank does for all.
    """

    def __init__(self, tells: bool = True) -> None:
        self._tells, self._begin = tells, time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._begin

    def say(self, text: str) -> None:
        """Print a line."""
        if self._tells:
            print(f"ficco doctor: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Print a line when what is inside is done."""
        begin = time.monotonic()
        yield
        self.say(f"{name}: {time.monotonic() - begin:.1f} s")
