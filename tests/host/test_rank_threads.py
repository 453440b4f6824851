"""The threads of the ranks of one process: jobs, errors, limits of time, ends and interrupts."""

from __future__ import annotations

import gc
import random
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ficco.runtime.rank_threads import RankThreads, Round

INTERRUPTED = Path(__file__).with_name("interrupted_node.py")
COUNT = 800


def threads() -> list[str]:
    return sorted(each.name for each in threading.enumerate() if each.name.startswith("ficco-rank"))


def test_all_ranks_run_a_job_and_errors_are_kept() -> None:
    ranks = RankThreads(3)

    def job(rank: int) -> tuple[int, str]:
        if rank == 1:
            raise ValueError("one")
        return rank, threading.current_thread().name

    for _ in range(50):
        found = Round(3)
        ranks.start(job, found)
        assert found.wait() and found.ended == [True] * 3
        assert found.values == [(0, "ficco-rank0"), None, (2, "ficco-rank2")]
        assert [str(error) for error in found.errors] == ["None", "one", "None"]
    ranks.end(wait=True)
    assert not threads()


def test_a_round_that_has_not_begun_is_not_waited_for() -> None:
    assert Round(2).wait()


def test_a_wait_has_a_limit() -> None:
    ranks, found, goes_on = RankThreads(2), Round(2), threading.Event()
    ranks.start(lambda rank: goes_on.wait(20) if rank else None, found)
    begin = time.monotonic()
    assert not found.wait(0.05) and 0.04 < time.monotonic() - begin < 10
    assert found.ended[1] is False
    goes_on.set()
    assert found.wait() and found.ended == [True, True]
    ranks.end(wait=True)


def test_threads_end_with_their_object() -> None:
    ranks = RankThreads(2)
    assert len(threads()) == 2
    del ranks
    gc.collect()
    end = time.monotonic() + 10
    while threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert not threads()


@pytest.mark.timeout(120)
def test_calls_may_be_interrupted_at_any_moment() -> None:
    """None hangs, and the node is right after a reset."""
    draw = random.Random(7)
    command = [sys.executable, "-P", str(INTERRUPTED), str(COUNT)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "calls\n"
            for number in range(COUNT):
                time.sleep(0.004 * draw.random())
                process.send_signal(signal.SIGINT)
                found, _, _ = select.select([process.stdout], [], [], 20)
                assert found, f"interrupt {number}: nothing for 20 s"
                assert process.stdout.readline() == "caught\n", number
            _, said = process.communicate(timeout=20)
            assert process.returncode == 0, said
        finally:
            process.kill()
