"""This process's GPU as one of a group: its memory for windows, which the other ranks write to.

On NVIDIA's GPUs the memory is PyTorch's symmetric memory. On AMD's it is memory of ficco's own:
fine-grained for data, not cached for words, and opened by the other processes through handles.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ficco.core.errors import DevicesRefused, EngineError, InputError
from ficco.core.private.torch_core import symmetric_memory
from ficco.engine import hip
from ficco.engine.compute.torch_device import TorchDeviceCompute
from ficco.engine.devices import Device
from ficco.engine.gpus import Exchange, Gpus
from ficco.runtime.gpus_of_group import vendor
from ficco.runtime.process import ProcessRuntime
from ficco.runtime.trusted_gpus import trusted_gpus

_log = logging.getLogger("ficco")
_EXCHANGED = "exchange addresses of windows"


class TorchGpu(Gpus):
    """The current GPU of PyTorch, as that of one rank; the other ranks are other processes.

    Args:
        runtime: of the group, which is being opened.
        group: the ProcessGroup.
        world: number of ranks.
        compute: makes tensors of memory.
    """

    def __init__(
        self, runtime: ProcessRuntime, group: Any, world: int, compute: TorchDeviceCompute
    ) -> None:
        self.vendor, self.ranks = vendor(), (runtime.rank,)
        self.devices = [None] * world  # until `kinds` exchanges them
        self._device, self._runtime = runtime.device, weakref.proxy(runtime)
        # The driver and PyTorch number devices alike.
        self._number: int = self._device.index
        self.numbers = {runtime.rank: self._number}
        self._group, self._compute = group, compute
        self._gpus = {}

    def kinds(self, exchange: Exchange) -> tuple[str, ...]:
        """See `Gpus.kinds`. The ranks also exchange their devices' PCI addresses.

        Raises:
            InputError: the ranks allow different kinds. All ranks raise it.
        """
        kinds: tuple[str, ...] = ()
        problem = ""
        try:
            kinds = self.vendor.signal_kinds()
        except InputError as error:  # sent to all ranks, so none waits for this one
            problem = str(error)
        own = (self.vendor.capabilities(self._number).pci, kinds, problem)
        facts = exchange("compare kinds of signals", [own])
        for other, (_, their_kinds, their_problem) in enumerate(facts):
            if their_problem:
                raise InputError(f"rank {other}: {their_problem}")
            if their_kinds != facts[0][1]:
                raise InputError(
                    f"rank 0 may signal by {facts[0][1]} and rank {other} by {their_kinds}; set "
                    "FICCO_SIGNALS to the same on every rank"
                )
        self.devices = [pci for pci, *_ in facts]
        return kinds

    def device(self, group: Any, rank: int) -> Device:
        """See `Gpus.device`; the first program may be bound in a capture."""
        device = super().device(group, rank)
        if device.wait == "kernel":
            device.stop_word(self._compute)
        return device

    def trusted(self, signals: str) -> str:
        """See `Gpus.trusted`."""
        _log.info("rank %d raises words at peers by kind %r", self.ranks[0], signals)
        return trusted_gpus(self._runtime, signals)

    def allocate(self, size: int) -> list[SymmetricMemory | IpcMemory]:
        """See `Gpus.allocate`.

        Raises:
            MemoryError: the device has too little memory.
        """
        (rank,) = self.ranks
        if not self._gpus:
            self._gpus[rank] = self.open(rank)
        try:
            memory = (
                SymmetricMemory(size, self._device)
                if torch.version.hip is None
                else IpcMemory(self._number, size)
            )
        except (torch.OutOfMemoryError, hip.GpuError) as error:
            raise MemoryError(f"windows of {size} bytes on {self._device}: {error}") from None
        # PyTorch clears new memory on the default stream; the current stream may not wait for it.
        torch.cuda.synchronize(self._device)
        self.fill(rank, memory.addresses[0], 0, size // 4)
        return [memory]

    def addresses(
        self, memory: Sequence[SymmetricMemory | IpcMemory], exchange: Exchange
    ) -> tuple[Sequence[int], Sequence[int]]:
        """See `Gpus.addresses`."""
        (mine,) = memory
        return mine.meet(self._group, exchange)

    def free(self, memory: list[Any]) -> None:
        """See `Gpus.free`. This does nothing: the memory is freed with the last reference."""


class SymmetricMemory:
    """Memory of an NVIDIA GPU: PyTorch's symmetric memory. It is freed with the last reference.

    Args:
        size: bytes.
        device: the rank's device.

    Raises:
        torch.OutOfMemoryError: the device has too little memory.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = symmetric_memory().empty(size, dtype=torch.uint8, device=device)
        self._handle: Any = None
        self.addresses = (self._memory.data_ptr(),) * 2

    def meet(self, group: Any, exchange: Exchange) -> tuple[list[int], list[int]]:
        """Return the addresses of all ranks' memory and of their words. A collective call."""
        try:
            self._handle = symmetric_memory().rendezvous(self._memory, group=group)
        except RuntimeError as error:
            raise EngineError(
                f"windows on {self._memory.device}: PyTorch refuses symmetric memory ({error})"
            ) from error
        # Memory from a pool begins at an offset from these addresses; a fresh allocation at 0.
        offset = int(getattr(self._handle, "offset", 0))
        bases = [base + offset for base in self._handle.buffer_ptrs]
        return bases, bases


class IpcMemory(hip.SharedMemory):
    """Memory of an AMD GPU that other processes open through handles; see `SymmetricMemory`."""

    def meet(self, group: Any, exchange: Exchange) -> tuple[list[int], list[int]]:
        """Return the addresses of all ranks' memory and of their words. A collective call.

        Raises:
            DevicesRefused: a rank cannot open the memory of another one. All ranks raise it.
        """
        mine = torch.distributed.get_rank(group)
        bases, words, reason = [], [], ""
        for rank, handles in enumerate(exchange(_EXCHANGED, [self.exported()])):
            try:
                base, word_base = self.addresses if rank == mine else self.opened(handles)
            except hip.GpuError as error:  # sent to all ranks
                reason = f"rank {mine} cannot open the memory of rank {rank}: {error}"
                break
            bases.append(base)
            words.append(word_base)
        # Nobody frees its memory before all have opened it.
        if reasons := [each for each in exchange(_EXCHANGED, [reason]) if each]:
            raise DevicesRefused(reasons[0])
        return bases, words
