"""The GPUs of one process, one per rank, with access to each other's memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ficco import _native
from ficco.errors import EngineError
from ficco.kernels.probe_code import ProbeCode

__all__ = ["Peers"]


class Peers(ABC):
    """The GPUs of one process, one per rank, of one vendor.

    Args:
        devices: the driver's number of each rank's device; all different.

    Attributes:
        devices: as above.
        visible: the environment variable that names the devices of a process.
        remedy: what to do if no signal arrives.

    Raises:
        EngineError: there are too few devices, two have no peer access, a package is missing, or a
            driver call fails.
    """

    visible: str
    remedy: str

    def __init__(self, devices: Sequence[int]) -> None:
        self.devices = tuple(devices)
        try:
            self._open(f"opening the devices {list(self.devices)}")
        except BaseException:
            self.close()
            raise

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    def _check_devices(self, count: int, task: str) -> None:
        """Check the devices against the number of those of the process."""
        if len(set(self.devices)) != self.world:
            raise EngineError(f"{task}: every rank needs a device of its own; name each once")
        if not all(0 <= device < count for device in self.devices):
            raise EngineError(
                f"{task}: {count} devices found; use fewer ranks, or let {self.visible} name more "
                "devices"
            )

    @abstractmethod
    def _open(self, task: str) -> None:
        """Open the devices, and allow them access to each other."""

    @abstractmethod
    def close(self) -> None:
        """Release the devices; a second call does nothing."""

    @abstractmethod
    def synchronize(self, rank: int) -> None:
        """Wait until a rank's device has completed all enqueued work.

        Raises:
            EngineError: the device has failed, or a graph is being captured.
        """

    @abstractmethod
    def capturing(self, rank: int, stream: int) -> bool:
        """Return whether a stream of a rank's device is being captured into a graph."""

    @abstractmethod
    def allocate(self, rank: int, size: int) -> tuple[int, int]:
        """Return the addresses of a rank's zeroed memory: of all of it, and of its words.

        Raises:
            EngineError: the device has too little memory, or a driver call fails.
        """

    @abstractmethod
    def free(self, rank: int, base: int, words: int) -> None:
        """Free what `allocate` returned."""

    @abstractmethod
    def fill(self, rank: int, at: int, value: int, count: int) -> None:
        """Store a 32-bit value so many times in a rank's memory; see `synchronize`."""

    @abstractmethod
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of signals to try; see `ficco.engines.peer_signals`."""

    @abstractmethod
    def writable(self, kind: str, rank: int) -> list[bool]:
        """Return, per rank, whether streams of a rank write to its words."""

    @abstractmethod
    def open(self, rank: int) -> _native.Gpu:
        """Open a rank's device for the native core."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the vendor, the driver with its variables, and each device, as JSON.

        Raises:
            GpuError: a driver call fails.
        """

    @abstractmethod
    def probe_code(self, rank: int) -> ProbeCode:
        """Return the kernels by which a rank's device is probed.

        Raises:
            EngineError: there are none for it.
        """
