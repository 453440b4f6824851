"""A command's streams (closed, full, without a reader, in ASCII), and its end on SIGTERM."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ficco.core import files
from ficco.core.errors import InputError

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


# ---- SIGTERM, which `timeout` or a batch system sends
#
# A command gets SystemExit and cleans up, as after an error. Python raises it only between
# bytecodes of the main thread, which may be in a long native call or wait for threads. Therefore
# a thread also watches for SIGTERM: after GRACE_S it ends a process that is still running.

GRACE_S = 0.6
CODE = 128 + signal.SIGTERM


@contextmanager
def ending() -> Iterator[None]:
    """End this process, its children and its temporary folders within a second of SIGTERM.

    Does nothing if the caller handles SIGTERM itself, or calls from another thread than the main
    one.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    read_end, write_end = os.pipe()
    for end in (read_end, write_end):
        os.set_blocking(end, end == read_end)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read_end,), name="ficco-ending", daemon=True).start()
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(before)
        os.close(write_end)  # ends the thread, unless it has received SIGTERM


def _end(number: int, frame: Any) -> None:
    raise SystemExit(CODE)


def _watch(read_end: int) -> None:
    """Wait for SIGTERM; end the process if it does not end by itself."""
    while signal.SIGTERM not in (numbers := os.read(read_end, 64)):
        if not numbers:
            os.close(read_end)
            return
    threading.Event().wait(GRACE_S)  # usually the process ends during this wait
    for child in _descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    files.remove_all()
    os._exit(CODE)


def _descendants(process: int) -> list[int]:
    """Return all child processes of a process, recursively."""
    descendants = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                descendants += [child, *_descendants(child)]
    return descendants
