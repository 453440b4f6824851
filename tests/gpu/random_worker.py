"""A rank on a GPU that makes random calls of the functions, behind random delays.

python random_worker.py SCENARIO STORE RANK WORLD WORDS
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ficco
from ficco.runtime.process_cuda import CudaProcessRuntime
from ficco.sweeping.gpu.joining import join

sys.path.append(str(Path(__file__).resolve().parents[1] / "modules"))
from random_calls import random_calls


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


def main(rank: int, world: int, seed: int, calls: int) -> None:
    ficco.prepare(machine="cuda", timeout_s=30.0)
    own, shortly = random.Random(5000 + rank), [0, 0]
    again = CudaProcessRuntime.again

    def counted(*args: Any) -> bool:
        made = again(*args)
        shortly[made] += 1
        return made

    CudaProcessRuntime.again = counted  # type: ignore[method-assign]

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if own.random() < 0.02:
            torch.cuda._sleep(own.randrange(2_000_000))
        return tensor.cuda()

    random_calls(rank, world, seed, calls, place, Graphs())
    assert shortly[True] > calls // 10, f"{shortly[True]} calls were told addresses alone"
    print(f"{calls} steps right, {shortly[True]} calls told addresses alone, {shortly[False]} not")


if __name__ == "__main__":
    store, mine, all_of_them = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    join(store, mine, all_of_them, sharing=all_of_them > torch.cuda.device_count())
    main(mine, all_of_them, **json.loads(sys.argv[5]))
    ficco.close()
    dist.destroy_process_group()
