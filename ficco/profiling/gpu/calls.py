"""The overheads of kernels and calls on a stream."""

from __future__ import annotations

import torch

import ficco
from ficco.profiling.call_overhead import probe
from ficco.profiling.gpu import driver
from ficco.profiling.gpu.driver import WordCommand
from ficco.profiling.gpu.ranks import Ranks

__all__ = ["launch", "probed"]

_KERNELS, _CALLS = 20, 10
DTYPE = "bfloat16"


def launch(ranks: Ranks, wait_us: float) -> float:
    """Return launch_us, the start-up time of a kernel that follows a command other than a kernel.

    Consecutive kernels overlap their starts, which their times contain already. Therefore GEMMs
    that each follow a satisfied wait are compared with the same GEMMs without waits; the difference
    less the waits is the start-up time. The result is the median rank's.

    Args:
        ranks: all ranks take part.
        wait_us: time of a satisfied wait.
    """
    holding = torch.ones(1, dtype=torch.int32, device=ranks.device)
    a, b, c = (torch.zeros((256, 256), dtype=torch.bfloat16, device=ranks.device) for _ in range(3))
    wait = [WordCommand(True, holding.data_ptr(), 1)]

    def plain() -> None:
        for _ in range(_KERNELS):
            torch.mm(a, b, out=c)

    def waiting() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for _ in range(_KERNELS):
            driver.words(wait, stream)
            torch.mm(a, b, out=c)

    with_waits_us, plain_us = (
        ranks.middle(ranks.timed(run, _KERNELS, together=False)) for run in (waiting, plain)
    )
    return max(0.0, with_waits_us - plain_us - wait_us)


def probed(ranks: Ranks) -> float:
    """Return the time of the probe as one of many captured calls, in us, on the slowest rank.

    ficco must be open for the GPUs.
    """
    problem, schedule = probe(ranks.world, DTYPE)
    columns = problem.outputs[0].columns[ranks.rank]
    x, w = (
        torch.zeros(shape, dtype=torch.bfloat16, device=ranks.device)
        for shape in ((problem.rows[ranks.rank], problem.k), (problem.k, columns))
    )

    def run() -> None:
        for _ in range(_CALLS):
            ficco.all_gather_matmul(x, w, schedule=schedule)

    return ranks.slowest(ranks.timed(run, _CALLS))
