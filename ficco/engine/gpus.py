"""The GPUs of a group, as the ranks of this process see them: memory for windows, and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ficco import _native
from ficco.core.errors import EngineError
from ficco.engine.devices import Device
from ficco.engine.window_layout import COPIES, WORDS_BYTES
from ficco.kernels.probe_code import ProbeCode

# Returns the values of all ranks, by rank; given are those of this process's ranks. A collective
# call if ranks are processes; the text is its purpose.
Exchange = Callable[[str, Sequence[Any]], list[Any]]


def in_this_process(what: str, values: Sequence[Any]) -> list[Any]:
    """Return the values of all ranks, which are in this process; an `Exchange`."""
    return list(values)


class PeerMemory:
    """Zeroed memory of a device of this process for a window and a mailbox.

    Args:
        gpu: the device.
        number: the driver's number of it.
        size: bytes.
        words_apart: whether the words have memory of their own.

    Attributes:
        addresses: of all of it, and of its words.

    Raises:
        EngineError: the device has too little memory, or a driver call fails.
    """

    def __init__(self, gpu: _native.Gpu, number: int, size: int, words_apart: bool) -> None:
        self._gpu, self._number = gpu, number
        self._parts: list[int] = []
        remedy = "free memory of that device, or run a smaller problem"
        try:
            with told(f"a window of {size} bytes on device {number}", remedy):
                self._parts.append(gpu.new_window_memory(size, False))
                if words_apart:
                    self._parts.append(gpu.new_window_memory(COPIES * WORDS_BYTES, True))
        except EngineError:
            self.free()
            raise
        self.addresses = self._parts[0], self._parts[-1]

    def synchronize(self) -> None:
        """Wait until the device has completed all enqueued work. Raises as `Gpus.synchronize`."""
        with told(f"waiting for device {self._number}"):
            self._gpu.synchronize()

    def free(self) -> None:
        """Free the memory.

        Raises:
            EngineError: a driver call fails.
        """
        while self._parts:
            with told(f"freeing a window on device {self._number}"):
                self._gpu.delete_window_memory(self._parts.pop())


class Gpus:
    """The GPUs of all ranks of a group, which are in this process and access each other's memory.

    `runtime.torch_gpu.TorchGpu` is one where the other ranks are other processes.

    Args:
        vendor: `ficco.engine.cuda` or `ficco.engine.hip`, the seam between vendors.
        devices: the driver's number of each rank's device; all different.

    Attributes:
        vendor: as above.
        ranks: the ranks of this process.
        devices: device of every rank, by a name that is the same in all processes.
        numbers: the driver's numbers of the devices of this process's ranks, by rank.

    Raises:
        EngineError: there are too few devices, two have no peer access, or a driver call fails.
    """

    devices: Sequence[Any]
    ranks: Sequence[int]
    _gpus: dict[int, _native.Gpu]  # opened devices, by rank

    def __init__(self, vendor: Any, devices: Sequence[int]) -> None:
        self.vendor, self.devices = vendor, tuple(devices)
        self.ranks, self.numbers = range(len(self.devices)), dict(enumerate(self.devices))
        task = f"opening the devices {list(self.devices)}"
        with told(task):
            self._check_devices(task)
            self._gpus = {rank: self.open(rank) for rank in self.ranks}
            for rank, gpu in self._gpus.items():
                for peer in self.devices:
                    if peer != self.devices[rank]:
                        gpu.reach(peer)

    def _check_devices(self, task: str) -> None:
        count = self.vendor.device_count()
        if len(set(self.devices)) != self.world:
            raise EngineError(f"{task}: every rank needs a device of its own; name each once")
        if not all(0 <= device < count for device in self.devices):
            raise EngineError(
                f"{task}: {count} devices found; use fewer ranks, or let {self.vendor.VISIBLE} "
                "name more devices"
            )
        unreached = [
            f"{device} to {peer}"
            for device in self.devices
            for peer in self.devices
            if not self.vendor.capabilities(device).peers[peer]
        ]
        if unreached:
            raise EngineError(
                f"no peer access from device {', '.join(unreached)}, which windows need; "
                f"{self.vendor.NO_ACCESS}"
            )

    def close(self) -> None:
        """Release the devices, which other users of the process may keep open."""
        self._gpus.clear()

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    def open(self, rank: int) -> _native.Gpu:
        """Open a rank's device for the native core."""
        gpu: _native.Gpu = self.vendor.open_gpu(self.numbers[rank])
        return gpu

    def calls(self, rank: int) -> _native.DriverCalls:
        """Return single calls of a rank's device, for probes."""
        return _native.DriverCalls(self.open(rank))

    def device(self, group: _native.Group, rank: int) -> Device:
        """Return a rank's device with streams and a watchdog of its own, as part of a group."""
        device: Device = self.vendor.Device(self.numbers[rank], group, rank)
        return device

    def shared(self, rank: int) -> bool:
        """Return whether another rank is on the device of a rank."""
        return list(self.devices).count(self.devices[rank]) > 1

    def synchronize(self, rank: int) -> None:
        """Wait until a rank's device has completed all enqueued work.

        Raises:
            EngineError: the device has failed, or a graph is being captured.
        """
        with told(f"waiting for device {self.numbers[rank]}"):
            self._gpus[rank].synchronize()

    def capturing(self, rank: int, stream: int) -> bool:
        """Return whether a stream of a rank's device is being captured into a graph."""
        with told(f"querying the capture of a stream of device {self.numbers[rank]}"):
            return self._gpus[rank].capturing(stream)

    # ---- signals

    def kinds(self, exchange: Exchange) -> tuple[str, ...]:
        """Return the kinds of signals to try; see `ficco.engine.peer_signals`."""
        kinds: tuple[str, ...] = self.vendor.signal_kinds()
        return kinds

    def writable(self, kind: str, rank: int) -> list[bool]:
        """Return, per rank, whether streams of a rank write to its words."""
        writable: list[bool] = self.vendor.writable_words(kind, self.devices, rank)
        return writable

    def trusted(self, signals: str) -> str:
        """Probe devices before their first use; see `probe_record.trusted`. A collective call."""
        if not self.vendor.IS_PROBED or self.world == 1:
            return ""
        from ficco.engine.probe_record import trusted

        return trusted(self, signals)

    def probe_code(self, rank: int) -> ProbeCode:
        """Return the kernels by which a rank's device is probed.

        Raises:
            EngineError: there are none for it.
        """
        code: ProbeCode = self.vendor.probe_code(self.numbers[rank])
        return code

    # ---- memory

    def new_memory(self, rank: int, size: int) -> PeerMemory:
        """Return memory of a rank's device. Raises as `PeerMemory`."""
        return PeerMemory(self._gpus[rank], self.numbers[rank], size, self.vendor.WORDS_APART)

    def allocate(self, size: int) -> list[Any]:
        """Return zeroed memory, as `PeerMemory`, for each rank of this process.

        Raises:
            EngineError or MemoryError: a device has too little memory, or a driver call fails.
        """
        memory: list[PeerMemory] = []
        try:
            for rank in self.ranks:
                memory.append(self.new_memory(rank, size))
        except BaseException:
            self.free(memory)
            raise
        return memory

    def addresses(
        self, memory: Sequence[Any], exchange: Exchange
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return, by rank, the addresses of all ranks' memory and words. A collective call.

        Raises:
            DevicesRefused: a rank cannot open the memory of another one; all ranks raise it.
        """
        bases, words = zip(*[each.addresses for each in memory], strict=True)
        return bases, words

    def free(self, memory: list[Any]) -> None:
        """Wait for the devices, then free what `allocate` returned; `close` may have been called.

        Raises:
            EngineError: a device has failed; the memory of the others is freed.
        """
        errors = []
        # All devices first: each may write to any window.
        waits = [each.synchronize for each in memory]
        for step in (*waits, *[each.free for each in reversed(memory)]):
            try:
                step()
            except EngineError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def fill(self, rank: int, at: int, value: int, count: int) -> None:
        """Store a 32-bit value so many times in a rank's memory; see `synchronize`."""
        with told(f"filling a window on device {self.numbers[rank]}"):
            self._gpus[rank].fill_words(at, value, count)


@contextmanager
def told(
    task: str, remedy: str = "if the device has failed, start a new process"
) -> Iterator[None]:
    """Raise errors of the driver as EngineError, with the task for which it was called."""
    try:
        yield
    except _native.GpuError as error:
        raise EngineError(f"{task}: {error}; {remedy}") from error
