"""What a library must do to compute for all GPUs of a process."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ficco.compute import DeviceCompute

__all__ = ["NodeCompute"]


class NodeCompute(DeviceCompute, Protocol):
    """A library that enqueues on all devices of a process.

    `empty` never reuses memory that it returned to a call captured into a graph.

    Attributes:
        captures: whether its calls can be captured into graphs.
    """

    captures: bool

    def current(self, device: int) -> Any:
        """Return this thread's current stream on a device, as an object of the library.

        Raises:
            InputError: other threads cannot use the stream.
        """

    def on(self, device: int, stream: Any) -> AbstractContextManager[None]:
        """Make a device and its stream current on this thread inside the context."""

    def layout(self, handle: Any) -> Hashable:
        """Return what the library's choice of kernels for a matrix depends on."""
