"""One rank's GPU, of any vendor: its streams and their watchdog."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from ficco import _native
from ficco.engine.compute import DeviceCompute
from ficco.engine.window_layout import Window

are_well = _native.are_well

_SETTLES_WITHIN_S = 5.0


class Device(ABC):
    """One rank's GPU: its streams and their watchdog.

    Args:
        ordinal: the driver's number of the device.
        gpu: the device.
        group: tracks which ranks have failed or are present; its own windows are not used.
        rank: the rank of the device.

    Attributes:
        wait: how it waits for signals; see `Target`.

    Raises:
        GpuError: a driver call fails.
    """

    wait: str

    def __init__(self, ordinal: int, gpu: _native.Gpu, group: _native.Group, rank: int) -> None:
        self.ordinal, self.group, self.rank = ordinal, group, rank
        self.native = _native.GpuRank(gpu, group, rank)

    @abstractmethod
    def stop_word(self, compute: DeviceCompute) -> int:
        """Return the address of a word that becomes 1 when the group fails; kernels poll it."""

    def forget(self, window: Window) -> None:
        """Stop the watchdog's use of a window that has no enqueued calls left.

        Call this before the window's memory is freed: the watchdog writes there when the group
        fails.

        Raises:
            GpuError: a read of the window does not end in time; the memory must not be freed.
        """
        self.native.forget(window.native)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Suspend the peers' timeout while this rank prepares a call, which may compile kernels."""
        self.group.set_preparing(self.rank, True)
        try:
            yield
        finally:
            self.group.set_preparing(self.rank, False)

    def follow(self, stream: int) -> None:
        """Make a stream of the device wait for the end of this rank's last call."""
        self.native.follow(stream)

    def settle(self) -> None:
        """Wait until the group knows the failure that an ended kernel has reported."""
        if not self.native.missed:
            return
        limit = time.monotonic() + _SETTLES_WITHIN_S
        while self.native.missed and self.group.failure() is None and time.monotonic() < limit:
            time.sleep(1e-3)
