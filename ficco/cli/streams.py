"""A command's standard streams: closed, without a reader, or with an ASCII encoding."""

from __future__ import annotations

import io
import os
import sys

from ficco.errors import InputError

__all__ = ["drop_output", "finish_output", "make_ready"]


def make_ready() -> None:
    """Prepare the streams for a command.

    A closed stdin becomes empty, and a closed stderr discards its output. Characters that stdout
    cannot encode are escaped, as in stderr.

    Raises:
        InputError: stdout, which receives the results, is closed.
    """
    for name, number, mode in (("stdin", 0, "r"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            _hold(number)  # else a file could get this descriptor and native code's output
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the process ends
    if sys.stdout is None:
        raise InputError(
            "standard output, which receives the results, is closed; redirect it to a file or to "
            "/dev/null"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _hold(number: int) -> None:
    """Open a closed descriptor on /dev/null."""
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)


def finish_output() -> None:
    """Flush stdout; do nothing if its reader has gone."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """Discard output whose reader has gone; else Python reports an error at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
