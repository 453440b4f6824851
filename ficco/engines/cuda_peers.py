"""CUDA devices of one process, which access each other's memory, over cuda-python."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ficco import _native
from ficco.engines import cuda
from ficco.engines.peer_signals import REMEDY, allowed_kinds, writable_words
from ficco.engines.peers import Peers
from ficco.errors import EngineError
from ficco.kernels.probe_code import ProbeCode, cuda_probe_code

__all__ = ["CudaPeers"]

_OUT_OF_MEMORY, _NO_PEER_ACCESS, _REACHED_ALREADY = 2, 217, 704


class CudaPeers(Peers):
    """CUDA devices. `close` releases their primary contexts, which all libraries share."""

    visible = "CUDA_VISIBLE_DEVICES"
    remedy = REMEDY

    def _open(self, task: str) -> None:
        self._contexts: list[Any] = []
        _call("cuInit", 0, task=task)
        self._check_devices(int(_call("cuDeviceGetCount", task=task)), task)
        handles = [_call("cuDeviceGet", device, task=task) for device in self.devices]
        self._check_pairs(handles)
        for device in handles:
            self._contexts.append(_call("cuDevicePrimaryCtxRetain", device, task=task))
        for rank in range(self.world):
            with self.current(rank):
                for peer in range(self.world):
                    if peer != rank:
                        self._reach(rank, peer)

    def _check_pairs(self, handles: Sequence[Any]) -> None:
        unreached = []
        for device, own in zip(self.devices, handles, strict=True):
            for other, peer in zip(self.devices, handles, strict=True):
                task = f"querying peer access of device {device} to device {other}"
                if device != other and not _call("cuDeviceCanAccessPeer", own, peer, task=task):
                    unreached.append(f"{device} to {other}")
        if unreached:
            raise _no_access(unreached)

    def _reach(self, rank: int, peer: int) -> None:
        pair = f"{self.devices[rank]} to {self.devices[peer]}"
        status = _status("cuCtxEnablePeerAccess", self._contexts[peer], 0)[0]
        if int(status) == _NO_PEER_ACCESS:
            raise _no_access([pair])
        if int(status) not in (0, _REACHED_ALREADY):
            raise _refused(f"peer access of device {pair}", "cuCtxEnablePeerAccess", status)

    @contextmanager
    def current(self, rank: int) -> Iterator[None]:
        """Make a rank's device current on this thread inside the block."""
        what = f"using device {self.devices[rank]}"
        _call("cuCtxPushCurrent", self._contexts[rank], task=what)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent", task=what)

    def synchronize(self, rank: int) -> None:
        """See `Peers.synchronize`."""
        with self.current(rank):
            _call("cuCtxSynchronize", task=f"waiting for device {self.devices[rank]}")

    def capturing(self, rank: int, stream: int) -> bool:
        """See `Peers.capturing`."""
        with self.current(rank):
            task = f"querying the capture of a stream of device {self.devices[rank]}"
            return int(_call("cuStreamIsCapturing", stream, task=task)) != 0

    def allocate(self, rank: int, size: int) -> tuple[int, int]:
        """See `Peers.allocate`."""
        with self.current(rank):
            task = f"a window of {size} bytes on device {self.devices[rank]}"
            base = int(_call("cuMemAlloc", size, task=task))
            _call("cuMemsetD8", base, 0, size, task=task)
        self.synchronize(rank)  # fills are asynchronous
        return base, base

    def free(self, rank: int, base: int, words: int) -> None:
        """See `Peers.free`."""
        with self.current(rank):
            _call("cuMemFree", base, task=f"freeing a window on device {self.devices[rank]}")

    def fill(self, rank: int, at: int, value: int, count: int) -> None:
        """See `Peers.fill`."""
        with self.current(rank):
            task = f"filling a window on device {self.devices[rank]}"
            _call("cuMemsetD32", at, value, count, task=task)

    def kinds(self) -> tuple[str, ...]:
        """See `Peers.kinds`."""
        return allowed_kinds()

    def writable(self, kind: str, rank: int) -> list[bool]:
        """See `Peers.writable`."""
        return writable_words(kind, self.devices, rank)

    def open(self, rank: int) -> _native.Gpu:
        """See `Peers.open`."""
        return _native.open_cuda(self.devices[rank])

    def identity(self) -> dict[str, Any]:
        """See `Peers.identity`."""
        found = [cuda.capabilities(device) for device in self.devices]
        devices = [[here.name, f"sm_{here.major}{here.minor}", *here.pci] for here in found]
        return {"vendor": "NVIDIA", "driver": cuda.served_version(), "devices": devices}

    def probe_code(self, rank: int) -> ProbeCode:
        """See `Peers.probe_code`."""
        return cuda_probe_code()

    def close(self) -> None:
        """Release the contexts; they stay alive if other users have retained them."""
        while self._contexts:
            self._contexts.pop()
            device = self.devices[len(self._contexts)]
            _call("cuDevicePrimaryCtxRelease", device, task=f"releasing device {device}")


def _no_access(pairs: Sequence[str]) -> EngineError:
    return EngineError(
        f"no peer access from device {', '.join(pairs)}, which windows need; use devices that "
        "NVLink or one PCIe switch connects (nvidia-smi topo -p2p r shows them), named by "
        "CUDA_VISIBLE_DEVICES (from CUDA 13.5 on the driver also refuses PCIe pairs that an IOMMU "
        "or PCI ACS separates)"
    )


def _status(name: str, *arguments: Any) -> tuple[Any, ...]:
    """Call a driver function; return its status, then its results."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as missing:
        raise EngineError(
            f"GPUs of one process need cuda-bindings ({missing}); pip install 'ficco[cuda]'"
        ) from missing
    try:
        results: tuple[Any, ...] = getattr(driver, name)(*arguments)
    except RuntimeError as missing:  # there is no driver, or it has no such function
        raise EngineError(f"{name}: {missing}; install a newer NVIDIA driver") from missing
    return results


def _call(name: str, *arguments: Any, task: str) -> Any:
    """Call a driver function; return its first result, or raise EngineError."""
    status, *results = _status(name, *arguments)
    if int(status) != 0:
        raise _refused(task, name, status)
    return results[0] if results else None


def _refused(task: str, call: str, status: Any) -> EngineError:
    """Return the error of a driver call that failed."""
    remedy = "if the device has failed, start a new process"
    if int(status) == _OUT_OF_MEMORY:
        remedy = "free memory of that device, or run a smaller problem"
    return EngineError(f"{task}: {call} answers {status.name} ({int(status)}); {remedy}")
