"""A progress line on a terminal for commands that take more than a few seconds."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

__all__ = ["Working"]

AFTER_S = 2.0  # nothing is shown earlier
EVERY_S = 0.5
_CLEAR = "\r\x1b[K"


class Working:
    """Shows the line on stderr while it is open, if stderr is a terminal.

    Args:
        command: the start of the line.
        enabled: whether this process shows the line; only one of several ranks does.
    """

    def __init__(self, command: str, enabled: bool = True) -> None:
        self._command, self._text = command, "at work"
        self._enabled = enabled and sys.stderr.isatty()
        self._begin, self._shown = time.monotonic(), False
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_on, name="ficco-working", daemon=True)

    def say(self, text: str) -> None:
        """Show what the command does now."""
        self._text = text
        self._show()

    def _keep_on(self) -> None:
        while not self._over.wait(EVERY_S):
            self._show()

    def _show(self) -> None:
        seconds = time.monotonic() - self._begin
        if not self._enabled or seconds < AFTER_S:
            return
        with self._lock:
            if not self._over.is_set():
                self._shown = True
                line = f"{_CLEAR}{self._command}: {self._text}, {seconds:.0f} s"
                print(line, end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Working:
        if self._enabled:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._over.set()
            if self._shown:
                print(_CLEAR, end="", file=sys.stderr, flush=True)
