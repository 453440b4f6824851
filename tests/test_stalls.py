"""A stall of the machine is noted, and only a test during which it happened is run again."""

from __future__ import annotations

import os
import signal
import time

import stalls


def test_a_stall_belongs_to_the_test_that_ran(monkeypatch) -> None:
    before = os.environ["FICCO_TEST_STALLS"]
    monkeypatch.setattr(stalls, "_begun", 0.0)
    watch = stalls.Watch()
    try:
        time.sleep(0.3)  # until it watches
        stalls.begin()
        os.kill(watch.pid, signal.SIGSTOP)  # to the process the machine seems to stand still
        time.sleep(2 * stalls.LEAST_S)
        os.kill(watch.pid, signal.SIGCONT)
        assert stalls.happened()
        stalls.begin()
        begun = time.monotonic()
        happened = stalls.happened()
        assert not happened or time.monotonic() - begun > stalls.LEAST_S  # unless a real one came
    finally:
        watch.close()
        os.environ["FICCO_TEST_STALLS"] = before
