"""Tensors of the CPU that pass for those of an AMD device of the double, a process per rank.

See `torch_on_double`. Windows are those of the product: memory of the double's library, which the
other ranks open by handles. Import this module before ficco's for PyTorch.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from gated_on_hip import HipKernels
from hip_control import LIBRARY, Hip
from hip_node import NumpyOnHip
from torch_on_double import Calls, OnTensors, Rank, array_of

from ficco.kernels.records import Operands

__all__ = ["HipRank"]

torch.version.hip = "7.1"  # as in a build for AMD's GPUs


class HipCalls:
    """See `Calls`."""

    def __init__(self, hip: Hip) -> None:
        self._hip = hip

    def new_stream(self) -> int:
        return self._hip.stream()

    def register(self, address: int, size: int) -> None:
        self._hip.hipHostRegister(address, size, 0)

    def unregister(self, address: int) -> None:
        self._hip.hipHostUnregister(address)

    def synchronize(self, stream: int) -> None:
        self._hip.hipStreamSynchronize(stream)

    def capturing(self, stream: int) -> bool:
        state = ctypes.c_int()
        self._hip.hipStreamIsCapturing(stream, ctypes.byref(state))
        return state.value != 0

    def begin_capture(self, stream: int) -> None:
        self._hip.hipStreamBeginCapture(stream, 2)  # relaxed

    def end_capture(self, stream: int) -> Any:
        graph = ctypes.c_size_t()
        self._hip.hipStreamEndCapture(stream, ctypes.byref(graph))
        return self._hip.new("hipGraphInstantiateWithFlags", graph.value, 0)

    def launch(self, graph: Any, stream: int) -> None:
        self._hip.hipGraphLaunch(graph, stream)

    def new_event(self) -> Any:
        return self._hip.new("hipEventCreateWithFlags", 2)

    def record(self, event: Any, stream: int) -> None:
        self._hip.hipEventRecord(event, stream)

    def ended(self, event: Any) -> bool:
        return self._hip.status("hipEventQuery", event) == 0


class _Kernels(HipKernels):
    """See `HipKernels`; operands may be tensors."""

    def place(self, b: Any) -> tuple[int, int, bool]:
        return super().place(array_of(b))

    def seen(self, operands: Operands) -> Operands:
        return super().seen({
            name: array_of(each) if isinstance(each, torch.Tensor) else each
            for name, each in operands.items()
        })  # fmt: skip


class _Compute(OnTensors, NumpyOnHip):
    """See `OnTensors`; the gated GEMM is that of the package."""

    _library = LIBRARY

    def __init__(self, device: int, stream: int, driver: Calls) -> None:
        super().__init__(device, stream, driver)
        self.kernels: Any = _Kernels(self)


class HipRank(Rank):
    """See `Rank`."""

    device_name = "AMD Instinct MI300X"

    def _open(self) -> Calls:
        hip = Hip()
        hip.hipSetDevice(self.rank)
        return HipCalls(hip)

    def _compute(self) -> Any:
        return _Compute(self.rank, self.stream, self.calls)
