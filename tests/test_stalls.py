"""A stall of the machine is noted, and only a test during which it happened is run again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import stalls


def test_a_stall_belongs_to_the_test_that_ran(monkeypatch) -> None:
    before = os.environ["FICCO_TEST_STALLS"]
    monkeypatch.setattr(stalls, "_begun", 0.0)
    watch = stalls.Watch()
    try:
        time.sleep(1.0)  # longer than the new process needs to begin
        stalls.begin()
        os.kill(watch.pid, signal.SIGSTOP)  # for the process this is a stall of the machine
        time.sleep(2 * stalls.LEAST_S)
        os.kill(watch.pid, signal.SIGCONT)
        noted, deadline = Path(os.environ["FICCO_TEST_STALLS"]), time.monotonic() + 30
        while not noted.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)  # a busy machine may resume the process late
        assert stalls.happened()
        stalls.begin()
        begun = time.monotonic()
        happened = stalls.happened()
        machine_stalled = time.monotonic() - begun > stalls.LEAST_S
        assert not happened or machine_stalled
    finally:
        watch.close()
        os.environ["FICCO_TEST_STALLS"] = before
