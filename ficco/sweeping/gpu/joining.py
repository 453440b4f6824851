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

__all__ = ["WAIT_S", "Said", "grow_windows", "join", "leave", "open_group"]

WAIT_S = 60.0  # of ranks for one another
_STAGED = "gloo_for_nccl"  # a backend's name; it serves the tensors that NCCL would


def join(store: Path | str, rank: int, world: int, sharing: bool = False, **words: Any) -> None:
    """Make the group of all ranks, and this rank's GPU the current one.

    Args:
        store: a file that is not there yet, through which ranks find each other.
        rank: this one.
        world: how many there are.
        sharing: whether ranks take GPUs in turns, where GPUs are fewer. A GPU then runs its ranks'
            processes by slices of time, kernels that wait like others: results are right, and no
            time on the device means anything. NCCL refuses such ranks, so gloo does its part,
            through the host's memory; no graph can capture that.
        words: of `init_process_group`.
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
    """Join the group of all ranks, on a stream that is not the default one.

    Args:
        folder: fresh, where ranks find each other.
        options: of the group, PyTorch's own.
        sharing: see `join`.

    Returns:
        This rank, and how many there are.
    """
    beat()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join(folder / "store", rank, world, sharing, pg_options=options)
    stream: Any = torch.cuda.Stream
    torch.cuda.set_stream(stream())
    dist.all_reduce(torch.ones(1, device="cuda"))
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
