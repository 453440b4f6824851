"""Measure a machine's GEMMs, links, signals and costs, and write them as a profile.

`gpu` measures the GPUs of a machine, `host` the host engine. The other modules choose the points to
measure, evaluate the times and write the profile. `Progress` reports each part on stderr.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ficco.core.logs import reporting


class Progress:
    """Prints each measured part and its time.

    Args:
        tells: whether this process prints; only one rank does.
    """

    def __init__(self, tells: bool = True) -> None:
        self._tells, self._begin = tells, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since this object was created."""
        return time.monotonic() - self._begin

    def say(self, text: str) -> None:
        """Print a line."""
        if self._tells:
            print(f"ficco doctor: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Print a line with the time of the `with` block after it; report a long one meanwhile."""
        begin = time.monotonic()
        with reporting(f"ficco doctor: measuring {name}", self._tells):
            yield
        self.say(f"{name}: {time.monotonic() - begin:.1f} s")
