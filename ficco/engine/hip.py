"""AMD's devices: what they can do, their streams and watchdog, targets, and shared memory.

Nothing here has run on AMD's hardware; see "AMD" in docs/design.md.
"""

from __future__ import annotations

import os
import platform
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ficco import _native
from ficco.core.errors import EngineError
from ficco.engine import devices
from ficco.engine.compute import DeviceCompute
from ficco.engine.window_layout import COPIES, WORDS_BYTES, Window
from ficco.kernels.amd_code import AWAIT_ENTRY, SHARED_BYTES, code_of
from ficco.kernels.probe_code import ProbeCode, amd_probe_code
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.program.passes.served import amd_refusal, check_amd_kernels
from ficco.program.target import Target, hip_target

GpuError = _native.GpuError
VARIABLES = ("AMD_", "GPU_", "HIP_", "HSA_", "ROC_", "ROCR_")  # first letters of the driver's
REMEDY = (
    "check peer access with `rocm-smi --showtopoaccess`, or set HIP_VISIBLE_DEVICES to devices "
    "that XGMI connects"
)
VISIBLE = "HIP_VISIBLE_DEVICES"  # names the devices of a process
NO_ACCESS = f"use devices that XGMI or one PCIe switch connects, named by {VISIBLE}"  # what to do
WORDS_APART = True  # whether words of windows have memory of their own
IS_PROBED = True  # whether devices are probed before their first use
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


def identity(devices: Sequence[int]) -> dict[str, Any]:
    """Return the vendor, the driver with its variables, and each device, as JSON.

    The driver of the kernel is told by the kernel's release. Raises as `capabilities`.
    """
    found = [capabilities(device) for device in devices]
    build = Path(library_path()).resolve()
    variables = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    return {
        "vendor": "AMD",
        "driver": f"HIP {_native.hip_driver_version()}",
        "library": [build.name, build.stat().st_size],
        "kernel": platform.release(),
        "variables": dict(sorted(variables.items())),
        "devices": [[here.name, here.arch, *here.pci] for here in found],
    }


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
    """One rank's AMD device; arguments are those of `ficco.engine.cuda.Device`.

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
    """Return the kinds of signals to try; see `ficco.engine.peer_signals`."""
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


class SharedMemory:
    """A rank's memory: of all of its window and mailbox, and of the words, which are not cached.

    It is freed with the last reference, and no longer open then.

    Args:
        device: number of the device.
        size: bytes of the window and the mailbox.

    Attributes:
        addresses: of both parts.

    Raises:
        GpuError: the device has too little memory, or a call of HIP fails.
    """

    def __init__(self, device: int, size: int) -> None:
        self._device, self._gpu = device, (gpu := _native.open_hip(device))
        self.addresses: list[int] = []
        self._opened: list[int] = []
        self._end = weakref.finalize(self, _free, gpu, device, self.addresses, self._opened)
        self._end.atexit = False  # the end of the process frees the memory
        self.addresses.append(gpu.new_window_memory(size, False))
        self.addresses.append(gpu.new_window_memory(COPIES * WORDS_BYTES, True))

    def exported(self) -> list[str]:
        """Return a handle for each part, as text, for other processes."""
        return [_native.hip_export_memory(self._device, each).hex() for each in self.addresses]

    def opened(self, handles: Sequence[str]) -> list[int]:
        """Return the addresses of another process's parts in this one.

        The device is allowed to access all that it can: HIP before rocm-systems pull request 817
        does not do so when it opens a handle.
        """
        found = []
        for peer, reached in enumerate(_native.hip_capabilities(self._device)[-1]):
            if reached and peer != self._device:
                self._gpu.reach(peer)
        for handle in handles:
            found.append(_native.hip_open_memory(self._device, bytes.fromhex(handle)))
            self._opened.append(found[-1])
        return found


def _free(gpu: _native.Gpu, device: int, own: Sequence[int], opened: Sequence[int]) -> None:
    frees = [partial(_native.hip_close_memory, device, address) for address in opened]
    for free in (*frees, *[partial(gpu.delete_window_memory, address) for address in own]):
        with suppress(GpuError):  # a finalizer has no caller to report to
            free()
