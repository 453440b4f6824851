"""Probes of a group's GPUs before their first use; all ranks get the same answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ficco.core.errors import DevicesRefused, EngineError, InputError
from ficco.engine import hip
from ficco.engine.gpus import Gpus
from ficco.runtime.gpus_of_group import ordinal, vendor
from ficco.runtime.process import ProcessRuntime


def trusted_gpus(runtime: ProcessRuntime, signals: str) -> str:
    """Return why copies do not overlap with kernels on the GPUs of a group; "" if they do.

    Only AMD's GPUs are probed: NVIDIA's were measured. Rank 0 opens all devices and probes them;
    the other ranks wait for it. Then all ranks test copies to memory that processes share, as that
    of windows. If a probe cannot be made, nothing overlaps. A collective call on the group.

    Args:
        runtime: of the group.
        signals: the kind of signals.

    Raises:
        DevicesRefused: results could be wrong, or calls could hang. All ranks raise it.
        InputError: FICCO_PROBES is neither 0 nor 1. All ranks raise it.
    """
    if torch.version.hip is None or runtime.world == 1:
        return ""
    # The PCI address and the number of each rank's device.
    gpus = runtime.gathered("compare GPUs", (vendor().capabilities(ordinal()).pci, ordinal()))
    answer = _answer(gpus, signals) if runtime.rank == 0 else None
    kind, text = runtime.gathered("probe GPUs", answer)[0]
    if kind == "refused":
        raise DevicesRefused(text)
    if kind == "input":
        raise InputError(text)
    if kind != "overlaps":
        return str(text)
    return _SharedCopies(runtime, gpus[runtime.rank][1]).reason()


def _answer(gpus: Sequence[tuple[Any, int]], signals: str) -> tuple[str, str]:
    """Return what rank 0 finds: "overlaps", "declined", "serial", "refused" or "input", and why."""
    from ficco.engine.probe_record import declined, trusted

    numbers = sorted({number for _, number in gpus})
    try:
        if declined():
            return "declined", ""
        if len({str(pci) for pci, _ in gpus}) < len(gpus):
            return "serial", "ranks share a device, so a kernel of one can stop the other"
        if len(numbers) < len(gpus):
            return "serial", (
                "each rank sees other devices, so none can probe them all; let every process see "
                "all devices (unset HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES)"
            )
        peers = Gpus(hip, numbers)
        try:
            reason = trusted(peers, signals)
        finally:
            peers.close()
    except DevicesRefused as error:
        return "refused", str(error)
    except InputError as error:
        return "input", str(error)
    except (EngineError, hip.GpuError) as error:
        return "serial", f"the devices cannot be probed: {error}"
    return ("serial", reason) if reason else ("overlaps", "")


class _SharedCopies:
    """The test of copies to memory that processes share. Ranks meet after each step.

    Args:
        runtime: of the group.
        number: of this rank's device.
    """

    def __init__(self, runtime: ProcessRuntime, number: int) -> None:
        self._rank, self._number = runtime.rank, number
        self._gathered = partial(runtime.gathered, "probe copies to shared memory")
        self._memory: Any = None
        self._copies: Any = None
        self._exported: list[str] = []
        self._handles: list[list[str]] = []  # of all ranks

    def reason(self) -> str:
        """Return why copies do not overlap with kernels, or ""."""
        error = self._agreed(self._allocate)
        if not error:
            self._handles = self._gathered(self._exported)
            error = self._agreed(self._open) or self._agreed(self._hold)
        if error:
            self._agreed(self._release)
            return f"copies to memory that processes share cannot be probed: {error}"
        late: list[list[str]] = self._gathered(self._copies.late())
        error = self._agreed(self._release)
        for rank, of_rank in enumerate(late):
            if of_rank:
                return (
                    f"copies of {'; '.join(of_rank)} from rank {rank} to memory that processes "
                    "share wait for a kernel that occupies the devices: kernels make them, no copy "
                    "engine"
                )
        return error

    def _agreed(self, step: Callable[[], None]) -> str:
        """Make a step; return the first rank's error, on all ranks, or ""."""
        error = ""
        try:
            step()
        except (EngineError, hip.GpuError) as failed:
            error = str(failed) or type(failed).__name__
        errors = self._gathered(error)
        return next((each for each in errors if each), "")

    def _allocate(self) -> None:
        from ficco.engine.window_copies import LARGEST

        self._memory = hip.SharedMemory(self._number, LARGEST)
        self._exported = self._memory.exported()

    def _open(self) -> None:
        from ficco.engine.window_copies import WindowCopies

        rank, memory = self._rank, self._memory
        places = [
            (memory.addresses if peer == rank else memory.opened(handles))[0]
            for peer, handles in enumerate(self._handles)
        ]
        gpu, code = hip.open_gpu(self._number), hip.probe_code(self._number)
        self._copies = WindowCopies(gpu, code, self._number, rank, places)

    def _hold(self) -> None:
        self._copies.hold()

    def _release(self) -> None:
        if self._copies is not None:
            self._copies.release()
