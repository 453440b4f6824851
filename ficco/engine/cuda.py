"""CUDA devices: what they can do, their streams and watchdog, and the targets of their programs."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from ficco.core.errors import EngineError, InputError, ScheduleError
from ficco.engine import devices, peer_signals
from ficco.engine.compute import DeviceCompute
from ficco.engine.window_layout import Window
from ficco.kernels.probe_code import ProbeCode, cuda_probe_code
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.program.target import Target, cuda_target

try:
    from ficco import _native
except ImportError as missing:
    raise EngineError(
        f"the native core cannot be loaded ({missing}); install ficco (pip install .) and run it "
        "from outside its source folder"
    ) from missing

GpuError = _native.GpuError
_log = logging.getLogger("ficco")
_WAITS = ("stream", "kernel")  # values of FICCO_WAITS; the first is the default

VISIBLE = "CUDA_VISIBLE_DEVICES"  # names the devices of a process
NO_ACCESS = (  # what to do
    "use devices that NVLink or one PCIe switch connects (nvidia-smi topo -p2p r shows them), "
    f"named by {VISIBLE} (from CUDA 13.5 on the driver also refuses PCIe pairs that an IOMMU or "
    "PCI ACS separates)"
)
WORDS_APART = False  # whether words of windows have memory of their own
IS_PROBED = False  # whether devices are probed before their first use: these were measured
REMEDY = peer_signals.REMEDY
signal_kinds, writable_words = peer_signals.allowed_kinds, peer_signals.writable_words
device_count = _native.cuda_device_count
open_gpu = _native.open_cuda


def served_version() -> str:
    """Return the CUDA version that the driver supports, as "13.0".

    Raises:
        GpuError: there is no driver, or it is too old.
    """
    version = _native.cuda_driver_version()
    return f"{version // 1000}.{version % 1000 // 10}"


def shares_one_queue() -> bool:
    """Return whether all streams of the process share one hardware queue."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


class Capabilities(NamedTuple):
    """What a device can do; see `capabilities`.

    Attributes:
        name, major, minor: the device, and its compute capability.
        pci: PCI domain, bus and device; the same in processes that number devices differently.
        copy_engines: number of asynchronous copy engines.
        flush_remote_writes: whether a stream wait can order writes by other devices.
        batch_copy_12_8, batch_copy_13_0: whether the driver has cuMemcpyBatchAsync with the
            signature of CUDA 12.8 or 13.0.
        peers: per device, whether this device can access its memory.
    """

    name: str
    major: int
    minor: int
    pci: tuple[int, int, int]
    copy_engines: int
    flush_remote_writes: bool
    batch_copy_12_8: bool
    batch_copy_13_0: bool
    peers: Sequence[bool]


def capabilities(device: int) -> Capabilities:
    """Return what a device can do.

    Raises:
        GpuError: there is no driver, it is too old, or it has no such device.
    """
    return Capabilities(*_native.cuda_capabilities(device))


def identity(devices: Sequence[int]) -> dict[str, Any]:
    """Return the vendor, the driver, and each device, as JSON. Raises as `capabilities`."""
    found = [capabilities(device) for device in devices]
    names = [[here.name, f"sm_{here.major}{here.minor}", *here.pci] for here in found]
    return {"vendor": "NVIDIA", "driver": served_version(), "devices": names}


@functools.cache  # once per device, not whenever windows grow
def _warn_of_streams(device: int, reason: str) -> None:
    """Log why stream operations store a device's words in place of a kernel."""
    text = "streams of device %d store words by themselves, which takes longer: %s"
    _log.warning(text, device, reason)


def _requested_wait(device: int, lacks: str) -> str:
    """Return how a device waits for signals: as FICCO_WAITS says, else by its streams.

    Raises:
        InputError: see `Device`.
    """
    asked = os.environ.get("FICCO_WAITS", "") or _WAITS[0]
    if asked not in _WAITS:
        raise InputError(
            f"FICCO_WAITS={asked!r} is no way to wait; set it to 'stream' or 'kernel', or unset it"
        )
    if asked == "kernel" and lacks:
        raise InputError(
            f"FICCO_WAITS='kernel', but device {device} has no kernel that waits: {lacks}; unset it"
        )
    return asked


class Device(devices.Device):
    """One rank's CUDA device.

    Args:
        ordinal: the driver's number of the device.
        group: tracks which ranks have failed or are present; its own windows are not used.
        rank: the rank of the device.

    Attributes:
        no_store: why the device has no kernels that store signals and wait for them, or "".
        wait: how it waits for signals; see `Target`.

    Raises:
        GpuError: a driver call fails.
        InputError: FICCO_WAITS names no way to wait, or one that the device lacks.
    """

    def __init__(self, ordinal: int, group: _native.Group, rank: int) -> None:
        gpu = _native.open_cuda(ordinal)
        self.no_store = gpu.no_store
        if gpu.no_store:
            _warn_of_streams(ordinal, gpu.no_store)
        self.wait = _requested_wait(ordinal, gpu.no_await)
        super().__init__(ordinal, gpu, group, rank)
        self._stop: Any = None

    def stop_word(self, compute: DeviceCompute) -> int:
        """See `devices.Device.stop_word`."""
        if self._stop is None:
            self._stop = compute.empty(1, 1, "int32")
            compute.reduce([], self._stop)  # 0
            address, _ = compute.place(self._stop)
            self.native.set_stop_word(address)
            weakref.finalize(self, self.native.set_stop_word, 0)
        address, _ = compute.place(self._stop)
        return address


def probe_code(ordinal: int) -> ProbeCode:
    """Return the kernels by which a device is probed."""
    return cuda_probe_code()


def blocked_by() -> str:
    """Return the variable that makes every launch wait for its end, if it is set, or ""."""
    name = "CUDA_LAUNCH_BLOCKING"
    return name if os.environ.get(name, "0") not in ("", "0") else ""


def check_runs(
    problem: Problem, schedule: Schedule, compute: DeviceCompute, no_overlap: str
) -> None:
    """Check that a schedule can run with a library's arrays on every rank.

    Only the schedule is read, so that all ranks refuse it alike, whatever their own plans need.
    Operators make no difference on these devices, and copies always overlap with kernels.

    Raises:
        ScheduleError: the schedule cannot run; the message names one that can.
    """
    if schedule.sums == "within" and shares_one_queue():
        raise ScheduleError(
            "sums='within': a launch waits for results of peers' kernels, and with "
            "CUDA_DEVICE_MAX_CONNECTIONS=1 their copies would queue after it in the one hardware "
            "queue; unset it, or use sums='apart'"
        )
    if compute.kernels is not None:
        return
    for axis, value, needs, nearest in (
        ("transport", "sm", "a kernel that stores at peers", "dma"),
        ("compute", "gated", "a kernel that waits for chunks", "per_chunk"),
    ):
        if getattr(schedule, axis) == value:
            raise ScheduleError(
                f"{axis}={value!r} needs {needs}, but arrays of {compute.name} have none; "
                f"the nearest that works is {axis}={nearest!r}"
            )


def target_of(device: Device, window: Window, compute: DeviceCompute) -> Target:
    """Return the target that programs for a device, its windows and a library are compiled for."""
    return cuda_target(
        window.writable,
        kernels=compute.kernels is not None,
        stores=not device.no_store,
        wait=device.wait,
        shared=window.shared,
    )
