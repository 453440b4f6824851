"""Locks of the product: another thread waits for one; a signal's handler gets an error instead."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import pytest

import ficco
from ficco.core.call_lock import CallLock

SOURCES = Path(__file__).parents[1] / "ficco"
OTHERS = {
    "core/call_lock.py",
    "cli/progress_line.py",
}  # no handler of a user runs inside the latter


def test_another_thread_waits() -> None:
    lock, taken = CallLock(), threading.Event()

    def take() -> None:
        with lock():
            taken.set()

    thread = threading.Thread(target=take)
    with lock():
        thread.start()
        assert not taken.wait(0.1)
    assert taken.wait(10)
    thread.join()


def test_a_handler_is_refused() -> None:
    lock, refused = CallLock(), []

    def handle(*_: object) -> None:
        with pytest.raises(ficco.EngineError, match="inside another call of the same thread"):
            lock()
        refused.append(True)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with lock():
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert refused
    with lock():
        pass


def test_a_forked_child_finds_locks_free() -> None:
    lock, taken, ended = CallLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock():
            taken.set()
            ended.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # ends a child that waits
        with lock():
            os._exit(0)
    ended.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_no_other_locks() -> None:
    """A handler that makes a call would wait for ever for a plain lock of the call it is in."""
    plain = re.compile(r"threading\.(R?Lock|Condition|\w*Semaphore)\b|from threading import")
    found = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        for line in path.read_text().splitlines()
        if plain.search(line)
    }
    assert found == OTHERS, "use CallLock"
