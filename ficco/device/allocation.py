"""Memory for windows: on a GPU, shared by processes of the CPU, or of one process.

On GPUs it is PyTorch's symmetric memory. On the CPU it is unnamed shared memory: rank 0 makes it
and passes its file descriptor to the others.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ficco.core.errors import EngineError
from ficco.core.private.torch_core import symmetric_memory
from ficco.runtime.object_exchange import Ranks

_TOKEN_BYTES = 16


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


def shared(size: int, ranks: Ranks) -> Memory:
    """Return memory of the CPU that the processes of a group share; a collective call.

    Raises:
        MemoryError: the host has too little memory. EngineError: a rank got other memory. All
            ranks raise it.
    """
    array = ranks.rendezvous.share(
        "share the memory of a window", partial(_made, ranks.world * size),
        partial(_joined, size, ranks.rank, ranks.world), *ranks.waits(),
    )  # fmt: skip
    base = array.ctypes.data
    own = torch.from_numpy(array[ranks.rank * size :][:size])
    return Memory(own, [base + rank * size for rank in range(ranks.world)], array)


def _made(size: int, brought: Sequence[Any]) -> tuple[int, dict[str, Any]]:
    """Return the file descriptor of new memory, and the token at its end."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    file = os.memfd_create("ficco-window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size + _TOKEN_BYTES)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        os.pwrite(file, token, size)
    except OSError as error:
        os.close(file)
        raise MemoryError(f"shared memory of {size} bytes: {error}") from error
    return file, {"token": token.hex()}


def _joined(size: int, rank: int, world: int, file: int, facts: dict[str, Any]) -> Any:
    """Return the memory of all ranks' windows. Reserve this rank's part, so that it is near."""
    expected = world * size + _TOKEN_BYTES
    if (found := os.fstat(file).st_size) != expected:
        raise EngineError(f"rank {rank} got memory of {found} bytes for a window, not {expected}")
    try:
        os.posix_fallocate(file, rank * size, size)
        array = np.frombuffer(mmap.mmap(file, expected), np.uint8)
    except OSError as error:
        raise MemoryError(f"a window of {size} bytes: {error}") from error
    if array[-_TOKEN_BYTES:].tobytes().hex() != facts["token"]:
        raise EngineError(f"rank {rank} got memory for a window that rank 0 has not made")
    return array


def local(size: int, world: int) -> list[Memory]:
    """Return memory of the CPU for all ranks, which forked processes share."""
    arrays = [np.frombuffer(mmap.mmap(-1, size), np.uint8) for _ in range(world)]
    bases = [array.ctypes.data for array in arrays]
    return [Memory(torch.from_numpy(array), bases, arrays) for array in arrays]
