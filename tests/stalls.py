"""Notes when the machine stands still, so that a test which failed meanwhile is run again.

Ranks of many tests wait for each other for a second at most, and a virtual machine may stop for
longer. `Watch` starts this file as a process, which sleeps for short times, and notes in a file
when a sleep was long: python stalls.py FILE
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["Watch", "begin", "happened"]

LEAST_S = 0.3  # shorter stalls are not noted
_SLEEP_S = 0.05
_FILE = "FICCO_TEST_STALLS"
_begun = 0.0


class Watch:
    """The process of this run. It ends when `close` is called, or when this process ends."""

    def __init__(self) -> None:
        number, name = tempfile.mkstemp(prefix="ficco-stalls")
        os.close(number)
        os.environ[_FILE] = name
        self._process = subprocess.Popen([sys.executable, "-S", __file__, name])
        self.pid = self._process.pid

    @staticmethod
    def is_there() -> bool:
        """Return whether this process was started by one that has a watch."""
        return _FILE in os.environ

    def close(self) -> None:
        """End the process, and remove its file."""
        self._process.kill()
        self._process.wait()
        Path(os.environ.pop(_FILE)).unlink()


def begin() -> None:
    """Note that a test of this process begins."""
    global _begun  # noqa: PLW0603
    _begun = time.monotonic()


def happened() -> bool:
    """Return whether the machine stood still since the last `begin`."""
    time.sleep(3 * _SLEEP_S)  # until a stall that ends now is noted
    ends = [float(line.split()[0]) for line in Path(os.environ[_FILE]).read_text().splitlines()]
    return any(end > _begun for end in ends)


def _watch(file: str) -> None:
    parent, last = os.getppid(), time.monotonic()
    while os.getppid() == parent:
        time.sleep(_SLEEP_S)
        now = time.monotonic()
        if now - last > LEAST_S:
            with open(file, "a", encoding="utf-8") as notes:
                notes.write(f"{now} {now - last}\n")
        last = now


if __name__ == "__main__":
    _watch(sys.argv[1])
