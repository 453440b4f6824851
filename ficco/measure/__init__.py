"""Measured and predicted times of schedules: one process per rank, or one per GPU.

    executors   run a command's problem as one rank of a group of processes
    launching   starts a process per rank, bounds their time, ends them; the rendezvous page
    ranks       a process joins the group, and leaves with it
    rounds      one shape on a rank: check, capture, time
    clock       times one configuration in one regime; the time of calls on a GPU
    layout      the shapes of a rank's tensors
    cases       the tensors, every way to run them and the GEMMs, and the reference results
    profiling   measures a machine's rates, latencies and costs
    simulator   predicts the timeline of a program on a machine
    selector    chooses the schedule of `auto`

`launching` and `layout` do not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


def host_us(call: Callable[[], object], calls: int) -> float:
    """Return the mean time of calls back to back, in us; it does not wait for a device."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - begin) / calls


def timed(
    ways: Sequence[Callable[[], float]],
    rounds: int,
    meet: Callable[[], object] = lambda: None,
    warm: bool = True,
) -> list[list[float]]:
    """Return the times of each way, from rounds in which all have a turn, each time another first.

    Args:
        ways: each runs something, and returns its time.
        rounds: number of rounds that count.
        meet: called before each turn, to wait for other ranks.
        warm: whether a round that does not count is the first.
    """
    times: list[list[float]] = [[] for _ in ways]
    for number in range(-warm, rounds):
        for place in range(len(ways)):
            at = (place + number) % len(ways)
            meet()
            time_taken = ways[at]()
            if number >= 0:
                times[at].append(time_taken)
    return times
