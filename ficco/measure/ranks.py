"""A rank's process: join the group, report to the launcher, and leave with the other ranks."""

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

from ficco.measure.cases import Operands
from ficco.measure.clock import beat
from ficco.measure.layout import Layout

WAIT_S = 60.0  # longest wait of ranks for one another
_STAGED = "gloo_for_nccl"  # name of a backend that replaces NCCL for CUDA tensors


def join(store: Path | str, rank: int, world: int, sharing: bool = False, **words: Any) -> None:
    """Create the group of all ranks, and make this rank's GPU the current one.

    Args:
        store: a file for the ranks' rendezvous; it does not exist yet.
        rank: this rank.
        world: number of ranks.
        sharing: whether ranks share GPUs because there are fewer GPUs. A GPU then time-slices its
            ranks' processes, including kernels that wait: results are correct, but device times
            are meaningless. NCCL refuses such ranks, so gloo replaces it, through host memory,
            which no graph can capture.
        words: further arguments of `init_process_group`.
    """
    device = torch.device("cuda", rank % torch.cuda.device_count() if sharing else rank)
    torch.cuda.set_device(device)
    backend = "nccl"
    if sharing:
        backend = f"cpu:gloo,cuda:{_STAGED}"
        dist.Backend.register_backend(_STAGED, _staged, devices=["cuda"])
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world,
        timeout=timedelta(seconds=WAIT_S), device_id=None if sharing else device, **words,
    )  # fmt: skip


def _staged(store: Any, rank: int, world: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, world, timeout=timeout)


def open_group(folder: Path, options: Any = None, sharing: bool = False) -> tuple[int, int]:
    """Join the group of all ranks, on a non-default stream.

    Args:
        folder: a new folder for the ranks' rendezvous.
        options: PyTorch's options of the group.
        sharing: see `join`.

    Returns:
        This rank and the number of ranks.
    """
    beat()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join(folder / "store", rank, world, sharing, pg_options=options)
    stream: Any = torch.cuda.Stream
    torch.cuda.set_stream(stream())
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    return rank, world


class RankLog:
    """The file that rank 0 writes for the launcher: one JSON value per line."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._writes = folder / "said.jsonl", rank == 0

    def __call__(self, kind: str, value: Any) -> None:
        """Write one line."""
        if self._writes:
            with self._path.open("a") as file:
                file.write(json.dumps({kind: value}) + "\n")


def grow_windows(layouts: Sequence[Layout], rank: int) -> None:
    """Run the shape with the largest window, so that no graph keeps a smaller window alive."""
    from ficco.core.machine import Machine
    from ficco.lowering import lower_rank
    from ficco.plan import window_places
    from ficco.plan.schedule import Schedule

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
    """Exit the process at once; destroying groups can hang."""
    beat()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)
