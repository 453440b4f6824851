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
from queue import Empty, SimpleQueue
from typing import Any

Function = Callable[[int], Any]  # of a rank
Queue = SimpleQueue[Any]


class RankJob:
    """A function that every rank calls once.

    Attributes:
        values: what the function returned, by rank.
        errors: what it raised, by rank; None where it ended well.
        ended: by rank, whether the call has ended.
    """

    def __init__(self, count: int) -> None:
        self.values: list[Any] = [None] * count
        self.errors: list[BaseException | None] = [None] * count
        self.ended = [False] * count
        self.begun: Queue = SimpleQueue()  # has an item once all ranks have the function
        self._wakes: Queue = SimpleQueue()

    def run(self, rank: int, function: Function) -> None:
        """Call the function for a rank, on its thread."""
        try:
            self.values[rank] = function(rank)
        except BaseException as error:
            self.errors[rank] = error
        self.ended[rank] = True
        self._wakes.put(None)
        del self, function  # an error's traceback has this frame, and would keep both alive

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all ranks have ended; at once if the job has not begun.

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

    def start(self, function: Function, job: RankJob) -> None:
        """Let all ranks call a function; see `RankJob.wait`. An interrupt comes before or after."""
        items = [(job, function)] * len(self._queues)
        _put([*self._queues, job.begun], [*items, True])

    def end(self, wait: bool) -> None:
        """End the threads; with `wait`, wait until they have ended."""
        self._end()
        for thread in self._threads if wait else ():
            thread.join()


def _put(queues: Sequence[Queue], items: Sequence[object]) -> None:
    """Put an item into each queue. No instruction of Python lies between, so no interrupt can."""
    deque(map(SimpleQueue.put, queues, items), maxlen=0)


def _end(queues: Sequence[Queue]) -> None:
    _put(queues, [None] * len(queues))


def _serve(queue: Queue, rank: int) -> None:
    while (work := queue.get()) is not None:
        job, function = work
        job.run(rank, function)
        del work, job, function  # nothing is kept while the thread waits
