"""The double of AMD's library, and ficco's native table on it.

Each test runs in a process of its own. Nothing here has run on AMD's hardware: the double does what
AMD's sources and reports say, which tests/double/hip/modes.cpp cites.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import subprocess
import sys
import threading
import time
from pathlib import Path

import double_control as control
from hip_control import NO_CU, Hip, on_hip_double, refusal


def test_native_tests_of_hip_pass(hip_folder: Path) -> None:
    done = subprocess.run(
        [hip_folder / "ficco_hip_tests"],
        env=control.environment(hip_folder / "hip_double"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout or not has_headers_of_hip_7(), done.stdout


def has_headers_of_hip_7() -> bool:
    """Return whether Triton is here in a release that has them."""
    try:
        release = importlib.metadata.version("triton").split(".")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, release[:2])) >= (3, 6)


@on_hip_double(devices=2, version=60401000, peers="none")
def test_devices_are_as_set(hip: Hip) -> None:
    from ficco import _native

    assert hip.number("hipGetDeviceCount") == _native.hip_device_count() == 2
    assert hip.number("hipRuntimeGetVersion") == _native.hip_driver_version() == 60401000
    assert hip.status("hipSetDevice", 2) == 101
    assert hip.number("hipDeviceCanAccessPeer", 0, 1) == 0
    assert hip.status("hipDeviceEnablePeerAccess", 1, 0) == 217
    name, arch, pci, units, warp, memory, shared, peers = _native.hip_capabilities(1)
    assert (name, arch, pci, units, warp) == ("ficco test double", "gfx942", (0, 2, 0), 304, 64)
    assert (memory, shared, peers) == (4 << 30, 64 << 10, [False, True])
    gpu = _native.open_hip(1)
    assert "copies of constants" in gpu.no_store and "no code" in gpu.no_await
    assert "no code object" in refusal(gpu.load_code, b"text", "kernel", 0)
    assert "no HIP device 2; the process has 2" in refusal(_native.open_hip, 2)


@on_hip_double(devices=0)
def test_no_device_is_told(hip: Hip) -> None:
    from ficco import _native

    assert hip.status("hipGetDeviceCount", ctypes.byref(ctypes.c_int())) == 100
    assert _native.hip_driver_version() == 70125424  # needs none
    for refused in (refusal(_native.hip_device_count), refusal(_native.open_hip, 0)):
        assert "finds no device; check HIP_VISIBLE_DEVICES" in refused
    assert hip.status("hipPeekAtLastError") == 0


@on_hip_double()
def test_the_last_error_is_that_of_hip_7(hip: Hip) -> None:
    stream = hip.stream()
    control.stall_stream(stream, 0.05)
    assert hip.status("hipFree", 4096) == 1
    assert hip.status("hipStreamQuery", stream) == 600
    hip.hipSetDevice(1)
    assert hip.status("hipGetLastError") == 1
    assert hip.status("hipGetLastError") == 0


@on_hip_double()
def test_copies_are_checked(hip: Hip) -> None:
    memory, stream = hip.memory(4, value=7), hip.stream()
    plain = ctypes.create_string_buffer(16)
    hip.hipSetDevice(1)
    far = hip.memory(4)
    hip.hipSetDevice(0)
    assert hip.status("hipMemcpyAsync", memory, far, 16, 5, stream) == 21
    assert hip.status("hipMemcpyAsync", memory, ctypes.addressof(plain), 16, NO_CU, stream) == 1
    assert hip.status("hipMemcpyAsync", memory, memory + 8, 16, NO_CU, stream) == 1
    hip.copy(far, memory, 4, stream, kind=4)  # through the host, without peer access
    hip.hipStreamSynchronize(stream)
    assert hip.read(far, 4) == [0x07070707] * 4
    hip.copy(far, memory, 4, stream)
    assert hip.status("hipStreamSynchronize", stream) == 700


@on_hip_double()
def test_a_device_that_fails_stays_failed(hip: Hip) -> None:
    from ficco import _native

    stream = hip.stream()
    control.fail_stream(hip.stream(), 719)
    deadline = time.monotonic() + 5
    while hip.status("hipStreamQuery", stream) != 719 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert hip.status("hipMalloc", ctypes.byref(ctypes.c_void_p()), 64) == 719
    assert "hipErrorLaunchFailure" in refusal(_native.open_hip, 0)
    hip.hipSetDevice(1)
    hip.memory(1)


@on_hip_double()
def test_captures_refuse_what_cannot_be_captured(hip: Hip) -> None:
    main, side = hip.stream(), hip.stream()
    memory = hip.memory(4)
    event, graph = hip.new("hipEventCreateWithFlags", 2), ctypes.c_size_t()
    for name, arguments, status in (
        ("hipStreamSynchronize", (main,), 900),
        ("hipStreamQuery", (main,), 900),
        ("hipFree", (memory,), 900),
        ("hipStreamBeginCapture", (main, 0), 401),
    ):
        hip.hipStreamBeginCapture(main, 0)
        assert hip.status(name, *arguments) == status, name
        expected = 901 if status == 900 else 0
        assert hip.status("hipStreamEndCapture", main, ctypes.byref(graph)) == expected
    hip.hipStreamBeginCapture(main, 2)
    hip.hipEventRecord(event, main)
    hip.hipStreamWaitEvent(side, event, 0)
    hip.copy(memory, memory + 8, 2, side)
    assert hip.status("hipStreamEndCapture", main, ctypes.byref(graph)) == 904


@on_hip_double(queues=1)
def test_queues_may_come_from_the_environment(hip: Hip) -> None:
    first, second, urgent = hip.stream(), hip.stream(), hip.stream(priority=-1)
    event = hip.new("hipEventCreateWithFlags", 2)
    control.stall_stream(first, 0.2)
    hip.hipEventRecord(event, urgent)
    hip.hipStreamSynchronize(urgent)
    hip.hipEventRecord(event, second)
    assert hip.status("hipStreamQuery", second) == 600
    hip.hipStreamSynchronize(second)
    assert hip.status("hipStreamQuery", first) == 0


@on_hip_double(nocu="dropped")
def test_dropped_copies_succeed(hip: Hip) -> None:
    hip.allow_peers()
    memory, stream = hip.memory(4, value=7), hip.stream()
    hip.copy(memory + 8, memory, 2, stream)
    hip.hipMemset(memory, 9, 8)
    hip.copy(memory + 8, memory, 2, stream)
    hip.hipStreamSynchronize(stream)
    assert hip.read(memory, 4) == [0x09090909] * 2 + [0x07070707] * 2
    hip.copy(memory + 8, memory, 2, stream, kind=3)
    hip.hipStreamSynchronize(stream)
    assert hip.read(memory + 8, 2) == [0x09090909] * 2


@on_hip_double(stale=1)
def test_kernels_in_python_acquire(hip: Hip) -> None:
    acquire = control._function("ficcoDoubleAcquire", ctypes.c_int)
    data, word = hip.memory(1), hip.memory(1, flags=3)
    source = hip.memory(1, value=7)
    seen: list[int] = []

    def word_of(parameter: int) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_address(ctypes.c_uint64.from_address(parameter).value)

    begun = threading.Event()  # a kernel that starts behind the copies has acquired them

    def wait_and_read(parameters: list[int], _: tuple[int, ...]) -> None:
        begun.set()
        while word_of(parameters[1]).value == 0:
            time.sleep(0.001)
        seen.append(word_of(parameters[0]).value)
        assert acquire() == 0
        seen.append(word_of(parameters[0]).value)

    running, copying = hip.stream(), hip.stream()
    hip.launch(control.kernel([8, 8], wait_and_read), running, data, word)
    assert begun.wait(10)
    for target in (data, word):
        hip.copy(target, source, 1, copying)
    hip.hipStreamSynchronize(running)
    assert seen == [0, 0x07070707]


@on_hip_double(fail="hipMalloc:1:2", copy_delay="0.3")
def test_faults_may_come_from_the_environment(hip: Hip) -> None:
    made = ctypes.c_void_p()
    assert [hip.status("hipMalloc", ctypes.byref(made), 4) for _ in range(3)] == [0, 2, 0]
    begin = time.monotonic()
    hip.read(made.value, 1)
    assert time.monotonic() - begin > 0.25


@on_hip_double(needs="hip")
def test_hip_python_calls_the_double(hip: Hip) -> None:
    """An independent caller finds what it expects, in HIP's own structures."""
    from hip import hip as python

    def call(name: str, *arguments: object) -> object:
        status, *values = getattr(python, name)(*arguments)
        assert status == python.hipError_t.hipSuccess, name
        return values[0] if len(values) == 1 else tuple(values)

    assert call("hipGetDeviceCount") == 4
    assert call("hipDriverGetVersion") == 70125424
    assert call("hipDeviceCanAccessPeer", 0, 1) == 1
    try:  # of hip-python 7, which fills what it is given
        properties = python.hipDeviceProp_t()
        call("hipGetDeviceProperties", properties, 2)
    except TypeError:
        properties = call("hipGetDeviceProperties", 2)
    names = [
        text.decode() if isinstance(text, bytes) else text
        for text in (properties.name, properties.gcnArchName)
    ]
    assert names == ["ficco test double", "gfx942:sramecc+:xnack-"]
    assert (properties.multiProcessorCount, properties.pciBusID) == (304, 3)
    assert (properties.warpSize, properties.sharedMemPerBlock) == (64, 64 << 10)
    call("hipSetDevice", 1)
    far = call("hipExtMallocWithFlags", 64, python.hipDeviceMallocFinegrained)
    call("hipMemset", far, 0, 64)
    call("hipSetDevice", 0)
    call("hipDeviceEnablePeerAccess", 1, 0)
    enabled = python.hipDeviceEnablePeerAccess(1, 0)[0]
    assert enabled == python.hipError_t.hipErrorPeerAccessAlreadyEnabled
    own = call("hipExtMallocWithFlags", 64, 3)  # uncached; hip-python has no name for it
    stream = call("hipStreamCreateWithPriority", python.hipStreamNonBlocking, -1)
    call("hipMemsetAsync", own, 7, 64, stream)
    kind = python.hipMemcpyKind.hipMemcpyDeviceToDeviceNoCU
    call("hipMemcpyAsync", far, own, 32, kind, stream)
    call("hipStreamSynchronize", stream)
    result = (ctypes.c_ubyte * 64)()
    call("hipMemcpy", result, far, 64, python.hipMemcpyKind.hipMemcpyDeviceToHost)
    assert bytes(result) == bytes([7] * 32 + [0] * 32)
    handle = python.hipIpcMemHandle_t()
    try:
        call("hipIpcGetMemHandle", handle, far)
    except TypeError:
        call("hipIpcGetMemHandle", far)
    assert control.count("memcpy") == 2


if __name__ == "__main__":
    globals()[sys.argv[1]](Hip())
