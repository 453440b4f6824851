"""AMD's devices of one process, which access each other's memory, over hip-python.

Nothing here has run on AMD's hardware; see "AMD" in docs/design.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ficco import _native
from ficco.engines import hip
from ficco.engines.peers import Peers, first_result, refused
from ficco.engines.window_layout import COPIES, WORDS_BYTES
from ficco.errors import EngineError
from ficco.kernels.probe_code import ProbeCode, amd_probe_code

__all__ = ["HipPeers"]

_REACHED_ALREADY = 704
_TO_DEVICE = 1
_FILLED = 1 << 18  # words that one copy fills


class HipPeers(Peers):
    """AMD's devices, which stay open until the process ends."""

    visible = "HIP_VISIBLE_DEVICES"
    remedy = (
        "check peer access with `rocm-smi --showtopoaccess`, or set HIP_VISIBLE_DEVICES to devices "
        "that XGMI connects"
    )

    def _open(self, task: str) -> None:
        self._check_devices(int(_call("hipGetDeviceCount", task=task)), task)
        for rank in range(self.world):
            with self.current(rank):
                for peer in range(self.world):
                    if peer != rank:
                        self._reach(rank, peer)

    def close(self) -> None:
        """See `Peers.close`."""

    def _reach(self, rank: int, peer: int) -> None:
        own, other = self.devices[rank], self.devices[peer]
        pair = f"device {own} to device {other}"
        if not _call("hipDeviceCanAccessPeer", own, other, task=f"querying access of {pair}"):
            raise EngineError(
                f"no peer access from {pair}, which windows need; use devices that XGMI or one "
                "PCIe switch connects, named by HIP_VISIBLE_DEVICES"
            )
        status, *_ = _status("hipDeviceEnablePeerAccess", other, 0)
        if int(status) not in (0, _REACHED_ALREADY):
            raise refused(f"access of {pair}", "hipDeviceEnablePeerAccess", status)
        _native.hip_forget_error()  # the thread's last error has it if access was allowed before

    @contextmanager
    def current(self, rank: int) -> Iterator[None]:
        """See `Peers.current`."""
        what = f"using device {self.devices[rank]}"
        before = int(_call("hipGetDevice", task=what))
        _call("hipSetDevice", self.devices[rank], task=what)
        try:
            yield
        finally:
            _call("hipSetDevice", before, task=what)

    def synchronize(self, rank: int) -> None:
        """See `Peers.synchronize`."""
        with self.current(rank):
            _call("hipDeviceSynchronize", task=f"waiting for device {self.devices[rank]}")

    def capturing(self, rank: int, stream: int) -> bool:
        """See `Peers.capturing`."""
        with self.current(rank):
            task = f"querying the capture of a stream of device {self.devices[rank]}"
            return int(_call("hipStreamIsCapturing", stream, task=task)) != 0

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
        task = f"filling a window on device {self.devices[rank]}"
        with self.current(rank):
            if not value:
                _call("hipMemset", at, 0, 4 * count, task=task)
                return
            words = np.full(min(count, _FILLED), value, np.uint32)
            for begin in range(0, count, _FILLED):
                size = 4 * min(_FILLED, count - begin)
                _call("hipMemcpy", at + 4 * begin, words, size, _kind(_TO_DEVICE), task=task)

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
        """See `Peers.identity`; the driver is that of the kernel, if it has a version."""
        found = [hip.capabilities(device) for device in self.devices]
        driver = Path("/sys/module/amdgpu/version")
        return {
            "vendor": "AMD",
            "driver": f"HIP {_native.hip_driver_version()}",
            "amdgpu": driver.read_text().strip() if driver.exists() else "of the kernel",
            "devices": [[here.name, here.arch, *here.pci] for here in found],
        }

    def probe_code(self, rank: int) -> ProbeCode:
        """See `Peers.probe_code`."""
        return amd_probe_code(hip.capabilities(self.devices[rank]).arch)


def _hip() -> Any:
    try:
        package = importlib.import_module("hip")
        return getattr(package, "hip", None) or importlib.import_module("hip.hip")
    except ImportError as missing:
        raise EngineError(
            f"AMD devices of one process need hip-python ({missing}); pip install 'ficco[rocm]'"
        ) from missing


def _kind(number: int) -> Any:
    return _hip().hipMemcpyKind(number)


def _status(name: str, *arguments: Any) -> tuple[Any, ...]:
    """Call a function of HIP; return its status, then its results."""
    function = getattr(_hip(), name)
    try:
        results: tuple[Any, ...] = function(*arguments)
    except RuntimeError as missing:  # there is no library, or it has no such function
        raise EngineError(f"{name}: {missing}; install ROCm 6.1 or later") from missing
    return results


def _call(name: str, *arguments: Any, task: str) -> Any:
    """Call a function of HIP; return its first result, or raise EngineError."""
    return first_result(_status(name, *arguments), name, task)
