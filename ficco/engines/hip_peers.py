"""AMD's devices of one process, which access each other's memory.

Nothing here has run on AMD's hardware; see "AMD" in docs/design.md.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ficco import _native
from ficco.engines import hip
from ficco.engines.peers import Peers
from ficco.engines.window_layout import COPIES, WORDS_BYTES
from ficco.errors import EngineError
from ficco.kernels.probe_code import ProbeCode

__all__ = ["HipPeers"]


class HipPeers(Peers):
    """AMD's devices, which stay open until the process ends."""

    visible = "HIP_VISIBLE_DEVICES"
    remedy = hip.REMEDY

    def _open(self, task: str) -> None:
        with _told(task):
            self._check_devices(hip.device_count(), task)
            for device in self.devices:
                reached = hip.capabilities(device).peers
                for peer in self.devices:
                    if not reached[peer]:
                        raise EngineError(
                            f"no peer access from device {device} to device {peer}, which windows "
                            "need; use devices that XGMI or one PCIe switch connects, named by "
                            "HIP_VISIBLE_DEVICES"
                        )
                    if peer != device:
                        _native.hip_reach(device, peer)

    def close(self) -> None:
        """See `Peers.close`."""

    def synchronize(self, rank: int) -> None:
        """See `Peers.synchronize`."""
        device = self.devices[rank]
        with _told(f"waiting for device {device}"):
            _native.hip_synchronize(device)

    def capturing(self, rank: int, stream: int) -> bool:
        """See `Peers.capturing`."""
        device = self.devices[rank]
        with _told(f"querying the capture of a stream of device {device}"):
            return _native.hip_capturing(device, stream)

    def allocate(self, rank: int, size: int) -> tuple[int, int]:
        """See `Peers.allocate`."""
        base = self._allocated(rank, size, False)
        try:
            return base, self._allocated(rank, COPIES * WORDS_BYTES, True)
        except EngineError:
            _native.hip_delete_window_memory(self.devices[rank], base)
            raise

    def _allocated(self, rank: int, size: int, words: bool) -> int:
        device = self.devices[rank]
        try:
            return _native.hip_new_window_memory(device, size, words)
        except _native.GpuError as error:
            raise EngineError(
                f"a window of {size} bytes on device {device}: {error}; free memory of that "
                "device, or run a smaller problem"
            ) from error

    def free(self, rank: int, base: int, words: int) -> None:
        """See `Peers.free`."""
        errors = []
        for address in (base, words):
            try:
                _native.hip_delete_window_memory(self.devices[rank], address)
            except _native.GpuError as error:
                errors.append(error)
        if errors:
            raise EngineError(f"freeing a window: {errors[0]}") from errors[0]

    def fill(self, rank: int, at: int, value: int, count: int) -> None:
        """See `Peers.fill`."""
        with _told(f"filling a window on device {self.devices[rank]}"):
            _native.hip_fill_words(self.devices[rank], at, value, count)

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of signals to try: copies alone."""
        return hip.signal_kinds()

    def writable(self, kind: str, rank: int) -> list[bool]:
        """Return, per rank, whether streams of a rank write to its words: to none."""
        return hip.writable_words(kind, self.devices, rank)

    def open(self, rank: int) -> _native.Gpu:
        """See `Peers.open`."""
        return hip.open_gpu(self.devices[rank])

    def identity(self) -> dict[str, Any]:
        """See `Peers.identity`; the driver of the kernel is told by the kernel's release."""
        found = [hip.capabilities(device) for device in self.devices]
        build = Path(hip.library_path()).resolve()
        variables = {
            name: value for name, value in os.environ.items() if name.startswith(hip.VARIABLES)
        }
        return {
            "vendor": "AMD",
            "driver": f"HIP {_native.hip_driver_version()}",
            "library": [build.name, build.stat().st_size],
            "kernel": platform.release(),
            "variables": dict(sorted(variables.items())),
            "devices": [[here.name, here.arch, *here.pci] for here in found],
        }

    def probe_code(self, rank: int) -> ProbeCode:
        """See `Peers.probe_code`."""
        return hip.probe_code(self.devices[rank])


@contextmanager
def _told(task: str) -> Iterator[None]:
    """Raise errors of HIP as EngineError, with the task for which it was called."""
    try:
        yield
    except _native.GpuError as error:
        raise EngineError(
            f"{task}: {error}; if the device has failed, start a new process"
        ) from error
