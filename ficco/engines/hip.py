"""AMD's devices: what they can do, their streams and watchdog, and the targets of their programs.

Nothing here has run on AMD's hardware; see "AMD" in docs/design.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from ficco import _native
from ficco.compute import DeviceCompute
from ficco.engines import devices
from ficco.engines.hip_memory import SharedMemory
from ficco.engines.window_layout import Window
from ficco.errors import EngineError
from ficco.kernels.amd_code import AWAIT_ENTRY, SHARED_BYTES, code_of
from ficco.kernels.probe_code import ProbeCode, amd_probe_code
from ficco.passes.served import amd_refusal, check_amd_kernels
from ficco.problem import Problem
from ficco.schedule import Schedule
from ficco.target import Target, hip_target

__all__ = [
    "REMEDY",
    "VARIABLES",
    "Capabilities",
    "Device",
    "GpuError",
    "blocked_by",
    "capabilities",
    "check_runs",
    "device_count",
    "library_path",
    "open_gpu",
    "probe_code",
    "served_version",
    "signal_kinds",
    "target_of",
    "why_no_windows",
    "writable_words",
]

GpuError = _native.GpuError
VARIABLES = ("AMD_", "GPU_", "HIP_", "HSA_", "ROC_", "ROCR_")  # first letters of the driver's
REMEDY = (
    "check peer access with `rocm-smi --showtopoaccess`, or set HIP_VISIBLE_DEVICES to devices "
    "that XGMI connects"
)
device_count = _native.hip_device_count
library_path = _native.hip_library


class Capabilities(NamedTuple):
    """What a device can do; see `capabilities`.

    Attributes:
        name, arch: the device, and the code that it runs, such as "gfx942".
        pci: PCI domain, bus and device; the same in processes that number devices differently.
        compute_units: number of compute units.
        warp: threads of a wavefront.
        memory_bytes, shared_bytes: of the device; that a block may use.
        peers: per device, whether this device can access its memory.
    """

    name: str
    arch: str
    pci: tuple[int, int, int]
    compute_units: int
    warp: int
    memory_bytes: int
    shared_bytes: int
    peers: Sequence[bool]


def capabilities(device: int) -> Capabilities:
    """Return what a device can do.

    Raises:
        GpuError: there is no HIP library, it is too old, or it has no such device.
    """
    return Capabilities(*_native.hip_capabilities(device))


def served_version() -> str:
    """Return the version of HIP, as "7.1".

    Raises:
        GpuError: there is no HIP library, or it is too old.
    """
    version = _native.hip_driver_version()
    return f"{version // 10_000_000}.{version // 100_000 % 100}"


def open_gpu(ordinal: int) -> _native.Gpu:
    """Open a device with its kernel that waits for signals.

    Raises:
        GpuError: a call of HIP fails.
        EngineError: there is no code for the device.
    """
    code = code_of(AWAIT_ENTRY, capabilities(ordinal).arch)
    return _native.open_hip(ordinal, code, SHARED_BYTES[AWAIT_ENTRY])


class Device(devices.Device):
    """One rank's AMD device; arguments are those of `ficco.engines.cuda.Device`.

    Raises:
        GpuError: a call of HIP fails.
        EngineError: there is no code for the device.
    """

    wait = "kernel"

    def __init__(self, ordinal: int, group: _native.Group, rank: int) -> None:
        super().__init__(ordinal, open_gpu(ordinal), group, rank)

    def stop_word(self, compute: DeviceCompute) -> int:
        """See `devices.Device.stop_word`; the watchdog has the word in host memory."""
        return self.native.stop_word


def probe_code(ordinal: int) -> ProbeCode:
    """Return the kernels by which a device is probed.

    Raises:
        EngineError: there is no code for the device.
    """
    return amd_probe_code(capabilities(ordinal).arch)


def signal_kinds() -> tuple[str, ...]:
    """Return the kinds of signals to try; see `ficco.engines.peer_signals`."""
    return ("copy",)


def writable_words(kind: str, devices: Sequence[Any], rank: int) -> list[bool]:
    """Return, per rank, whether a rank's streams write to its words: to none."""
    return [False] * len(devices)


def blocked_by() -> str:
    """Return the variable that makes every launch wait for its end, if it is set, or ""."""
    for name in ("HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL", "AMD_SERIALIZE_COPY"):
        if os.environ.get(name, "0") not in ("", "0"):
            return name
    return ""


def why_no_windows(device: int) -> str:
    """Return why a device cannot have windows that other processes open, or ""."""
    try:
        code_of(AWAIT_ENTRY, capabilities(device).arch)
        SharedMemory(device, 4).exported()
    except (EngineError, GpuError) as error:
        return str(error)
    return ""


def check_runs(
    problem: Problem, schedule: Schedule, compute: DeviceCompute, no_overlap: str
) -> None:
    """Check that a schedule can run on every rank.

    Of the problem only the operator is read, so that all ranks refuse a schedule alike, whatever
    their own plans need.

    Args:
        problem: the problem.
        schedule: its schedule.
        compute: the library of the arrays.
        no_overlap: why copies do not overlap with kernels on the devices of all ranks, or "".

    Raises:
        ScheduleError: the schedule cannot run; the message names one that can.
    """
    check_amd_kernels(problem, schedule)
    if schedule.compute != "gated":
        return
    why = ""
    if compute.kernels is None:
        why = f"arrays of {compute.name} have no kernel that waits for chunks"
    elif no_overlap:
        why = f"the kernel may occupy all compute units while it waits for copies ({no_overlap})"
    if why:
        raise amd_refusal("compute", "gated", why, "per_chunk")


def target_of(device: Device, window: Window, compute: DeviceCompute) -> Target:
    """Return the target that programs for a device, its windows and a library are compiled for."""
    return hip_target(gathers=compute.kernels is not None)
