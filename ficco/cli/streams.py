"""A command's standard streams: closed, full, without a reader, or with an ASCII encoding."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ficco.errors import InputError

__all__ = ["drop_output", "error_text", "finish_output", "make_ready", "reader_may_leave"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


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


def finish_output() -> OSError | None:
    """Flush stdout; if it cannot be written, discard its output and return the error."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        drop_output()
        return error
    return None


def error_text(error: OSError) -> str:
    """Return the text of an error; of a full device without a name, that it is of the output."""
    if error.filename is None and error.errno in _FULL:
        return (
            f"standard output cannot be written: {error.strerror}; free some space, or redirect it "
            "to another file"
        )
    return str(error)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Print within it what a command has found; if the reader leaves, the command goes on.

    So its exit code says what it found, as with `ficco run | head -1`.
    """
    try:
        yield
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """Discard output that nothing takes; else Python reports an error at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
