"""A thread for each rank of one process, on which all ranks run a job at once.

An interrupt (Ctrl-C) may raise KeyboardInterrupt between any two instructions of the main thread.
Locks of Python code, such as those of `concurrent.futures`, can then stay locked, and a thread
waits for ever. So the threads share queues alone: an interrupt cannot divide their operations.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from queue import Empty, SimpleQueue
from typing import Any

__all__ = ["RankThreads", "Round"]

Job = Callable[[int], Any]
Queue = SimpleQueue[Any]


class Round:
    """A job that every rank runs once.

    Attributes:
        values: what the job returned, by rank.
        errors: what it raised, by rank; None where it ended well.
        ended: by rank, whether the job has ended.
    """

    def __init__(self, count: int) -> None:
        self.values: list[Any] = [None] * count
        self.errors: list[BaseException | None] = [None] * count
        self.ended = [False] * count
        self.begun: Queue = SimpleQueue()  # has an item once all ranks have the job
        self._wakes: Queue = SimpleQueue()

    def run(self, rank: int, job: Job) -> None:
        """Run the job of a rank, on its thread."""
        try:
            self.values[rank] = job(rank)
        except BaseException as error:
            self.errors[rank] = error
        self.ended[rank] = True
        self._wakes.put(None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all ranks have ended; at once if the round has not begun.

        Args:
            timeout_s: the longest time to wait, in seconds; None: no limit.

        Returns:
            False if they have not ended in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.begun.empty() and not all(self.ended):
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                self._wakes.get(timeout=left)
            except Empty:
                return all(self.ended)
        return True


class RankThreads:
    """The threads of all ranks. They end with `end`, with this object, or with the process.

    Args:
        count: number of ranks.
    """

    def __init__(self, count: int) -> None:
        self._queues: list[Queue] = [SimpleQueue() for _ in range(count)]
        self._end = weakref.finalize(self, _end, self._queues)
        self._threads = [
            threading.Thread(
                target=_serve, args=(queue, rank), name=f"ficco-rank{rank}", daemon=True
            )
            for rank, queue in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, job: Job, given: Round) -> None:
        """Let all ranks run a job; see `Round.wait`. An interrupt comes before or after."""
        _put_all([*self._queues, given.begun], (given, job))

    def end(self, wait: bool) -> None:
        """End the threads; with `wait`, wait until they have ended."""
        self._end()
        for thread in self._threads if wait else ():
            thread.join()


def _put_all(queues: Sequence[Queue], item: object) -> None:
    """Put an item into all queues. No instruction of Python lies between, so no interrupt can."""
    deque(map(SimpleQueue.put, queues, repeat(item)), maxlen=0)


def _end(queues: Sequence[Queue]) -> None:
    _put_all(queues, None)


def _serve(queue: Queue, rank: int) -> None:
    while (work := queue.get()) is not None:
        given, job = work
        given.run(rank, job)
        del work, given, job  # nothing is kept while the thread waits
