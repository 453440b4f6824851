"""Progress of commands that take more than a few seconds: a line that changes, or several lines."""

from __future__ import annotations

import sys
import threading
import time

AFTER_S = 2.0  # nothing is shown earlier
EVERY_S = 0.5
LINE_EVERY_S = 5.0  # in a file, where each line stays
_CLEAR = "\r\x1b[K"


class Working:
    """Shows on stderr what a command does, while it is open.

    On a terminal it is one line, which changes and disappears at the end. In a file or a pipe it is
    a line every LINE_EVERY_S seconds.

    Args:
        command: the start of the line.
        enabled: whether this process shows the line; only one of several ranks does.
    """

    def __init__(self, command: str, enabled: bool = True) -> None:
        self._command, self._text = command, "at work"
        self._enabled, self._terminal = enabled, sys.stderr.isatty()
        self._begin, self._shown = time.monotonic(), False
        self._next_line_s = AFTER_S
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_on, name="ficco-working", daemon=True)

    def say(self, text: str) -> None:
        """Show what the command does now."""
        self._text = text
        if self._terminal:
            self._show()

    def _keep_on(self) -> None:
        while not self._over.wait(EVERY_S):
            self._show()

    def _show(self) -> None:
        seconds = time.monotonic() - self._begin
        if not self._enabled or seconds < AFTER_S:
            return
        with self._lock:
            if self._over.is_set():
                return
            line = f"{self._command}: {self._text}, {seconds:.0f} s"
            if self._terminal:
                self._shown = True
                print(f"{_CLEAR}{line}", end="", file=sys.stderr, flush=True)
            elif seconds >= self._next_line_s:
                self._next_line_s = seconds + LINE_EVERY_S
                print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> Working:
        if self._enabled:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over.set()
            if self._shown:
                print(_CLEAR, end="", file=sys.stderr, flush=True)
