"""Random calls of the functions on a GPU, behind random delays: a scenario of serve.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from random_calls import random_calls

import ficco
from ficco.runtime.process_gpu import GpuProcessRuntime


class Graphs:
    """Graphs of PyTorch, which keep what they allocate."""

    def capture(self, calls: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()  # no rank's NCCL runs into another one's capture
        with torch.cuda.graph(graph):
            calls()
        return graph

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()


def at_random(rank: int, world: int, seed: int, calls: int) -> None:
    """Make random calls; many of them must be told addresses alone."""
    ficco.prepare(machine="cuda", timeout_s=30.0)
    own, shortly = random.Random(5000 + rank), [0, 0]
    again = GpuProcessRuntime.run_prepared

    def counted(*args: Any) -> Any:
        made = again(*args)
        shortly[made is not None] += 1
        return made

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if own.random() < 0.02:
            torch.cuda._sleep(own.randrange(2_000_000))
        return tensor.cuda()

    GpuProcessRuntime.run_prepared = counted  # type: ignore[method-assign]
    try:
        random_calls(rank, world, seed, calls, place, Graphs())
    finally:
        GpuProcessRuntime.run_prepared = again  # type: ignore[method-assign]
    assert shortly[True] > calls // 10, f"{shortly[True]} calls were told addresses alone"
    print(f"{calls} steps right, {shortly[True]} calls told addresses alone, {shortly[False]} not")
    ficco.close()
