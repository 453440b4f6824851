"""Symmetric memory that all ranks of a measurement write to, and its address on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ficco.private.torch_core import symmetric_memory
from ficco.profiling.gpu.ranks import Ranks

__all__ = ["MIB", "RecvBuffer"]

MIB = 1 << 20
_ALL_MIB, _RANK_MIB = 256, 64


class RecvBuffer:
    """A buffer on every GPU; its creation is a collective call.

    Attributes:
        size: bytes of every rank's buffer: 256 MiB, or 64 MiB per rank if that is more.
        bases: the address of every rank's buffer.
        memory: this rank's buffer, as bytes.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.size = max(_ALL_MIB, _RANK_MIB * ranks.world) * MIB
        symmetric = symmetric_memory()
        self.memory = symmetric.empty(self.size, dtype=torch.uint8, device=ranks.device)
        self.memory.zero_()
        torch.cuda.synchronize()
        group: Any = dist.group.WORLD
        self._handle = symmetric.rendezvous(self.memory, group=group)
        self.bases = [int(base) for base in self._handle.buffer_ptrs]
        ranks.meet()
