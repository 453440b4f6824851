"""Does torch.ops.symm_mem.all_to_all_vdev_2d work here? It needs NVSHMEM. A rank of the probe."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ficco.measure.ranks import open_group

__all__ = ["FOUND", "run"]

FOUND = "probe.json"
ROWS, WIDTH, EXPERTS = 12, 64, 3  # rows per expert and rank; EXPERTS: of a rank


def run(folder: Path) -> int:
    """Exchange rows once; rank 0 writes whether the result is right."""
    from torch.distributed import _symmetric_memory as symmetric

    symmetric.set_backend("NVSHMEM")
    rank, world = open_group(folder)
    group: Any = dist.group.WORLD
    splits, device = EXPERTS * world, torch.device("cuda", torch.cuda.current_device())

    def made(*shape: int, kind: torch.dtype = torch.int64) -> Any:
        tensor = symmetric.empty(*shape, dtype=kind, device=device)
        symmetric.rendezvous(tensor, group=group)
        return tensor

    x = made(ROWS * splits, WIDTH, kind=torch.bfloat16).fill_(rank + 1)
    out = made(ROWS * splits, WIDTH, kind=torch.bfloat16).fill_(-1)
    given, found = made(splits).fill_(ROWS), made(2, splits).fill_(0)
    operators: Any = torch.ops.symm_mem
    operators.all_to_all_vdev_2d(x, out, given, found, group.group_name)
    torch.cuda.synchronize()
    wanted = torch.arange(1, world + 1).repeat_interleave(ROWS).repeat(EXPERTS)
    right = torch.equal(out[:, 0].long().cpu(), wanted)
    if rank == 0:
        said = "it works; it was not measured" if right else "it gives wrong results"
        (folder / FOUND).write_text(json.dumps(said))
    dist.barrier()
    os._exit(0)
