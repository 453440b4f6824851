"""Joining a group of ranks on the CPU."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def join_gloo(store: str, rank: int, world: int) -> None:
    """Join the group of all ranks, which meet in a file."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
