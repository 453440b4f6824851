"""A process of one rank joins the others, tells the one that started it, and leaves with them."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ficco.sweeping.gpu.layout import Layout
from ficco.sweeping.gpu.operands import Operands
from ficco.sweeping.gpu.timing import beat

__all__ = ["WAIT_S", "Said", "grow_windows", "leave", "open_group"]

WAIT_S = 60.0  # of ranks for one another


def open_group(folder: Path, options: Any = None) -> tuple[int, int]:
    """Join the NCCL group of all ranks, on a stream that is not the default one.

    Args:
        folder: fresh, where ranks find each other.
        options: of the group, PyTorch's own.

    Returns:
        This rank, and how many there are.
    """
    beat()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world,
        timeout=timedelta(seconds=WAIT_S), device_id=device, pg_options=options,
    )  # fmt: skip
    stream: Any = torch.cuda.Stream
    torch.cuda.set_stream(stream())
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    return rank, world


class Said:
    """What rank 0 writes for the process that started it: one JSON value a line."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._writes = folder / "said.jsonl", rank == 0

    def __call__(self, kind: str, value: Any) -> None:
        """Write one line."""
        if self._writes:
            with self._path.open("a") as file:
                file.write(json.dumps({kind: value}) + "\n")


def grow_windows(layouts: Sequence[Layout], rank: int) -> None:
    """Run the shape that needs the largest window, so that no graph keeps a smaller one alive."""
    from ficco.lowering import lower_rank
    from ficco.machine import Machine
    from ficco.plan import window_places
    from ficco.schedule import Schedule

    world = int(os.environ["WORLD_SIZE"])
    schedule = Schedule.named("shard_p2p").resolve(world, Machine.named("cuda"))
    needs = {
        layout: window_places(lower_rank(layout.problem, schedule, rank).buffers)[1]
        for layout in layouts
    }
    if needs:
        beat()
        largest = max(needs, key=lambda layout: needs[layout])
        Operands(largest, rank).ficco(schedule)(0)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()


def leave() -> int:
    """End at once: nothing is left to do, and taking groups down can hang."""
    beat()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)
