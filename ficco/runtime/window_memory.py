"""Memory of a process's GPU for windows, which the other ranks of a group write to.

On NVIDIA's GPUs it is PyTorch's symmetric memory. On AMD's it is own memory: fine-grained for data,
not cached for words, and opened by the other processes through handles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ficco.compute.torch_device import TorchDeviceCompute
from ficco.engines import hip_memory
from ficco.engines.window_layout import COPIES, WORDS_BYTES
from ficco.errors import DevicesRefused
from ficco.private.torch_core import symmetric_memory

__all__ = ["IpcMemory", "SymmetricMemory", "WindowMemory", "window_memory"]

Gathered = Callable[[Any], list[Any]]


class WindowMemory(Protocol):
    """One rank's memory for its window and mailbox; it is freed with the last reference.

    Attributes:
        words: int32 [2 copies, words of a copy] of the own memory.
        all: int32 [1, bytes / 4] of the own memory, which includes the words where they have no
            memory of their own.
    """

    words: Any
    all: Any

    def meet(self, group: Any, gathered: Gathered) -> tuple[list[int], list[int]]:
        """Return the addresses of all ranks' memory and of their words. A collective call.

        Args:
            group: a ProcessGroup.
            gathered: returns the values that all ranks pass, by rank.

        Raises:
            DevicesRefused: a rank cannot open the memory of another one. All ranks raise it.
        """


class SymmetricMemory:
    """See `WindowMemory`.

    Args:
        size: bytes.
        device: the rank's device.

    Raises:
        torch.OutOfMemoryError: the device has too little memory.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = symmetric_memory().empty(size, dtype=torch.uint8, device=device)
        self._handle: Any = None
        self.all = self._memory.view(torch.int32).view(1, -1)
        self.words = self.all[0, : COPIES * WORDS_BYTES // 4].view(COPIES, -1)

    def meet(self, group: Any, gathered: Gathered) -> tuple[list[int], list[int]]:
        """See `WindowMemory.meet`."""
        self._handle = symmetric_memory().rendezvous(self._memory, group=group)
        # Memory from a pool begins at an offset from these addresses; a fresh allocation at 0.
        offset = int(getattr(self._handle, "offset", 0))
        bases = [base + offset for base in self._handle.buffer_ptrs]
        return bases, bases


class IpcMemory:
    """See `WindowMemory`.

    Args:
        size: bytes.
        device: the rank's device.
        compute: makes tensors of the memory.

    Raises:
        GpuError: the device has too little memory, or a call of HIP fails.
    """

    def __init__(self, size: int, device: torch.device, compute: TorchDeviceCompute) -> None:
        self._memory = hip_memory.SharedMemory(device.index, size)
        base, words = self._memory.addresses
        self.all = compute.at(base, 1, size // 4, "int32")
        self.words = compute.at(words, COPIES, WORDS_BYTES // 4, "int32")

    def meet(self, group: Any, gathered: Gathered) -> tuple[list[int], list[int]]:
        """See `WindowMemory.meet`."""
        mine = torch.distributed.get_rank(group)
        memory = self._memory
        bases, words, reason = [], [], ""
        for rank, handles in enumerate(gathered(memory.exported())):
            try:
                base, word_base = memory.addresses if rank == mine else memory.opened(handles)
            except hip_memory.GpuError as error:  # sent to all ranks
                reason = f"rank {mine} cannot open the memory of rank {rank}: {error}"
                break
            bases.append(base)
            words.append(word_base)
        # Nobody frees its memory before all have opened it.
        if reasons := [each for each in gathered(reason) if each]:
            raise DevicesRefused(reasons[0])
        return bases, words


def window_memory(size: int, device: torch.device, compute: TorchDeviceCompute) -> WindowMemory:
    """Return memory for windows of this build of PyTorch's GPUs.

    Raises:
        MemoryError: the device has too little memory.
    """
    try:
        if torch.version.hip is None:
            return SymmetricMemory(size, device)
        return IpcMemory(size, device, compute)
    except (torch.OutOfMemoryError, hip_memory.GpuError) as error:
        raise MemoryError(f"windows of {size} bytes on {device}: {error}") from None
