"""The threads of the ranks of one process: jobs, errors, limits of time, ends and interrupts."""

from __future__ import annotations

import functools
import gc
import random
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from ficco.runtime.rank_threads import RankJob, RankThreads

INTERRUPTED = Path(__file__).with_name("interrupted_node.py")
COUNT = 800


def test_all_ranks_run_a_job_and_errors_are_kept() -> None:
    ranks = RankThreads(3)

    def job(rank: int) -> tuple[int, str]:
        if rank == 1:
            raise ValueError("one")
        return rank, threading.current_thread().name

    for _ in range(50):
        found = RankJob(3)
        ranks.start(job, found)
        assert found.wait() and found.ended == [True] * 3
        assert found.values == [(0, "ficco-rank0"), None, (2, "ficco-rank2")]
        assert [str(error) for error in found.errors] == ["None", "one", "None"]
    ranks.end(wait=True)
    assert not any(thread.is_alive() for thread in ranks._threads)


def test_a_job_that_has_not_begun_is_not_waited_for() -> None:
    assert RankJob(2).wait()


def test_a_wait_has_a_limit() -> None:
    ranks, found, goes_on = RankThreads(2), RankJob(2), threading.Event()
    ranks.start(lambda rank: goes_on.wait(20) if rank else None, found)
    begin = time.monotonic()
    assert not found.wait(0.05) and 0.04 < time.monotonic() - begin < 10
    assert found.ended[1] is False
    goes_on.set()
    assert found.wait() and found.ended == [True, True]
    ranks.end(wait=True)


def test_threads_end_with_their_object() -> None:
    ranks = RankThreads(2)
    threads = ranks._threads
    assert all(thread.is_alive() for thread in threads)
    del ranks
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


class Array:
    """Stands for what a call takes."""


def divides(rank: int, by: int, array: Array) -> int:
    return 1 // by


@pytest.mark.parametrize("by", [1, 0], ids=["right", "error"])
def test_nothing_keeps_the_arrays_of_a_call_that_has_ended(by: int) -> None:
    """No cycle of references does, which would keep them until the next garbage collection."""
    ranks, job, array = RankThreads(2), RankJob(2), Array()
    alive = weakref.ref(array)
    gc.disable()
    try:
        ranks.start(functools.partial(divides, by=by, array=array), job)
        job.wait()
        failed = job.errors[0] is not None
        ranks.end(wait=True)
        del job, array
        assert alive() is None and failed == (by == 0)
    finally:
        gc.enable()


@pytest.mark.timeout(120)
def test_calls_may_be_interrupted_at_any_moment() -> None:
    """No call hangs, and the node is right after a reset."""
    draw = random.Random(7)
    command = [sys.executable, "-P", str(INTERRUPTED), str(COUNT)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "calls\n"
            for number in range(COUNT):
                time.sleep(0.004 * draw.random())  # a random moment within one of the next calls
                process.send_signal(signal.SIGINT)
                found, _, _ = select.select([process.stdout], [], [], 20)
                assert found, f"interrupt {number}: nothing for 20 s"
                assert process.stdout.readline() == "caught\n", number
            _, said = process.communicate(timeout=20)
            assert process.returncode == 0, said
        finally:
            process.kill()
