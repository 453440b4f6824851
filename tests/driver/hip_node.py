"""All ranks on devices of the double of AMD's library.

For processes that have the double as that library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from engine_node import Node
from gated_on_hip import HipKernels
from hip_control import LIBRARY, Hip
from numpy_on_stream import NumpyOnStream

from ficco.core.machine import Machine
from ficco.engine.window_layout import COPIES, Layout
from ficco.runtime.node_runtime import NodeRuntime

__all__ = ["HipNode", "NumpyOnHip"]

HIP = replace(Machine.named("mi300x8"), name="double")


class NumpyOnHip(NumpyOnStream):
    """See `NumpyOnStream`; the gated GEMM is that of the package."""

    _library, _launch_host, _capturing = LIBRARY, "hipLaunchHostFunc", "hipStreamIsCapturing"
    _waiting = frozenset({"hipLaunchHostFunc", "hipMemsetAsync"})  # for one that synchronizes

    def __init__(self, streams: dict[int, int]) -> None:
        super().__init__(streams)
        self.kernels = HipKernels(self)

    @contextmanager
    def on(self, device: int, stream: int) -> Iterator[None]:
        before = ctypes.c_int()
        self._check("hipGetDevice", ctypes.byref(before))
        self._check("hipSetDevice", device)
        self._thread.device, self._thread.stream = device, stream
        try:
            yield
        finally:
            self._check("hipSetDevice", before.value)

    def _allocate(self, size: int) -> int:
        memory = ctypes.c_void_p()
        self._check("hipMalloc", ctypes.byref(memory), ctypes.c_size_t(size))
        assert memory.value is not None
        return memory.value

    def _fill(self, address: int, size: int) -> None:
        self._check(
            "hipMemsetAsync", ctypes.c_void_p(address), 255, ctypes.c_size_t(size),
            ctypes.c_void_p(self.stream()),
        )  # fmt: skip


class HipNode(Node):
    """See `Node`."""

    def __init__(self, world: int, timeout_s: float = 20.0) -> None:
        self.hip, self.world, self.streams = Hip(), world, {}
        for device in range(world):
            self.hip.hipSetDevice(device)
            self.streams[device] = self.hip.stream()
        self.hip.hipSetDevice(0)
        self.compute = NumpyOnHip(self.streams)
        self.timeout_s = timeout_s
        self.runtime = self.new_runtime()

    def new_runtime(self) -> NodeRuntime:
        return NodeRuntime(self.world, HIP, self.compute, self.timeout_s)

    def wait(self) -> None:
        for stream in self.streams.values():
            self.hip.hipStreamSynchronize(ctypes.c_void_p(stream))

    def poison(self) -> None:
        windows: Any = self.runtime._places[-1].windows  # the test's own reach inside
        layout = Layout(windows.sizes)
        for base in windows.bases:
            ctypes.memset(base + layout.data, 255, COPIES * layout.sizes.window)
