"""A command's standard streams: closed ones, those without a reader, and those for ASCII alone."""

from __future__ import annotations

import io
import os
import sys

from ficco.errors import InputError

__all__ = ["drop_output", "finish_output", "make_ready"]


def make_ready() -> None:
    """Prepare the streams for a command.

    A closed stdin is empty, and a closed stderr takes anything. What stdout cannot encode is
    written as an escape, as in stderr.

    Raises:
        InputError: stdout is closed, where results go.
    """
    for name, number, mode in (("stdin", 0, "r"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            _hold(number)  # or a file would be opened there, and get what native code prints
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the process ends
    if sys.stdout is None:
        raise InputError(
            "standard output is closed, where results go; send it to a file or to /dev/null"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _hold(number: int) -> None:
    """Open a descriptor that is closed, on what takes anything."""
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)


def finish_output() -> None:
    """Write what is left; nothing happens where the reader has gone."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """Throw away what is left for a reader that has gone; Python would complain at its exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
