"""Memory for windows: on a GPU, shared by processes of the CPU, or of one process.

On GPUs it is PyTorch's symmetric memory. On the CPU it is unnamed shared memory, which the
processes of one host map.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ficco.errors import EngineError
from ficco.modules.groups import gathered
from ficco.private.torch_core import symmetric_memory

__all__ = ["Memory", "local", "shared", "symmetric"]


class Memory(NamedTuple):
    """Bytes of every rank.

    Attributes:
        own: this rank's bytes.
        bases: each rank's address, as this rank sees it.
        keep: what keeps the memory.
    """

    own: torch.Tensor
    bases: Sequence[int]
    keep: Any


def symmetric(size: int, device: torch.device, pg: Any) -> Memory:
    """Return zeroed symmetric memory of a GPU; a collective call."""
    module = symmetric_memory()
    memory = module.empty(size, dtype=torch.uint8, device=device)
    # PyTorch clears new memory on the default stream; the current stream may not wait for it.
    torch.cuda.synchronize(device)
    memory.zero_()
    torch.cuda.synchronize(device)
    try:
        handle = module.rendezvous(memory, group=pg)
    except RuntimeError as error:
        raise EngineError(
            f"a window on {device}: PyTorch's symmetric memory is refused ({error}); let each rank "
            "have a GPU of its own, by torch.cuda.set_device before ficco.window"
        ) from error
    offset = memory.data_ptr() - handle.buffer_ptrs[dist.get_rank(pg)]
    return Memory(memory, [base + offset for base in handle.buffer_ptrs], handle)


def shared(size: int, pg: Any) -> Memory:
    """Return memory of the CPU that the processes of a group share; a collective call."""
    own = os.memfd_create("ficco-window")
    try:
        os.ftruncate(own, size)
        places = gathered(pg, torch.device("cpu"), f"/proc/{os.getpid()}/fd/{own}")
        arrays = [_mapped(place, size) for place in places]
        gathered(pg, torch.device("cpu"), None)  # all have opened it
    finally:
        os.close(own)
    memory = torch.from_numpy(arrays[dist.get_rank(pg)])
    return Memory(memory, [array.ctypes.data for array in arrays], arrays)


def _mapped(place: str, size: int) -> Any:
    """Return memory that a process of this host shares."""
    try:
        with open(place, "r+b") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    except OSError as error:
        raise EngineError(
            f"the memory {place} of another rank cannot be opened: {error}; run all ranks as one "
            "user, in one container"
        ) from error


def local(size: int, world: int) -> list[Memory]:
    """Return memory of the CPU for all ranks, which forked processes share."""
    arrays = [np.frombuffer(mmap.mmap(-1, size), np.uint8) for _ in range(world)]
    bases = [array.ctypes.data for array in arrays]
    return [Memory(torch.from_numpy(array), bases, arrays) for array in arrays]
