"""The driver's test double behaves as the driver does, where that matters to ficco.

Each test runs in a process of its own, by cuda-bindings, which loads the double as the driver. The
statuses of refused calls are those that driver 580.159 (CUDA 13.0) was seen to return.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
import time

import double_control as control
from double_control import Cuda, on_double

# CUstreamWaitValue_flags
_GEQ, _EQ, _AND, _NOR = range(4)
_FLUSH = 1 << 30


@on_double(devices=3, version=12040)
def test_devices_are_as_set(cuda: Cuda) -> None:
    attribute = cuda.driver.CUdevice_attribute
    assert cuda.cuDeviceGetCount() == 3
    assert cuda.cuDriverGetVersion() == 12040
    assert cuda.cuDeviceGetName(40, 1).startswith(b"ficco test double")
    assert cuda.cuDeviceGetAttribute(attribute(75), 0) == 9
    assert cuda.cuDeviceGetAttribute(attribute(40), 0) == 3
    assert cuda.cuDeviceGetAttribute(attribute(98), 0) == 0
    assert cuda.status("cuDeviceGet", 3) == 101
    assert cuda.cuCtxGetStreamPriorityRange() == (0, -5)


@on_double(version=12020)
def test_names_are_looked_up_by_version(cuda: Cuda) -> None:
    library = ctypes.CDLL("libcuda.so.1")

    def look_up(name: bytes, version: int) -> tuple[int, int | None, int]:
        pointer, found = ctypes.c_void_p(), ctypes.c_int()
        status = library.cuGetProcAddress_v2(
            name, ctypes.byref(pointer), version, ctypes.c_uint64(0), ctypes.byref(found)
        )
        return status, pointer.value, found.value

    def address(name: str) -> int | None:
        return ctypes.cast(library[name], ctypes.c_void_p).value

    info = b"cuStreamGetCaptureInfo"
    assert look_up(info, 11000) == (0, address("cuStreamGetCaptureInfo"), 0)
    assert look_up(info, 12000) == (0, address("cuStreamGetCaptureInfo_v2"), 0)
    assert look_up(info, 9000) == (0, None, 2)
    assert look_up(b"cuMemAlloc", 12000) == (0, address("cuMemAlloc_v2"), 0)
    assert look_up(b"cuNoSuchFunction", 12000) == (0, None, 1)
    assert look_up(b"cuMemAlloc_v2", 12000) == (0, None, 1)
    assert look_up(info, 12030)[0] == 1  # newer than the driver
    # The form of three arguments alone is here.
    assert look_up(b"cuCtxCreate", 3020) == (0, address("cuCtxCreate_v2"), 0)
    assert look_up(b"cuCtxCreate", 12000) == (0, None, 1)


@on_double()
def test_a_stream_does_its_work_in_order(cuda: Cuda) -> None:
    control.jitter(7, 0.001)
    stream = cuda.stream()
    memory = cuda.words(64)
    seen: list[int] = []
    callbacks = []
    for i in range(20):
        cuda.cuMemsetD32Async(memory, i, 64, stream)
        callbacks.append(
            cuda.host_function(
                stream, lambda _: seen.append(ctypes.c_uint32.from_address(memory + 252).value)
            )
        )
    assert cuda.status("cuStreamQuery", stream) == 600
    cuda.cuStreamSynchronize(stream)
    assert cuda.status("cuStreamQuery", stream) == 0
    assert seen == list(range(20))
    assert control.count("host") == 20


@on_double()
def test_events_are_those_of_the_call(cuda: Cuda) -> None:
    first, second = cuda.stream(), cuda.stream()
    start, end = cuda.cuEventCreate(0), cuda.cuEventCreate(0)
    assert cuda.status("cuEventQuery", end) == 0  # never recorded
    cuda.cuEventRecord(start, first)
    control.stall_stream(int(first), 0.05)
    cuda.cuEventRecord(end, first)
    cuda.cuStreamWaitEvent(second, end, 0)
    later = cuda.stream()
    control.stall_stream(int(later), 1)
    # A later record is none of the stream's that already waits.
    cuda.cuEventRecord(end, later)
    cuda.cuStreamSynchronize(second)
    assert cuda.status("cuStreamQuery", first) == 0
    assert cuda.status("cuEventQuery", end) == 600
    cuda.cuEventSynchronize(end)
    assert 900 < cuda.cuEventElapsedTime(start, end) < 5000
    untimed = cuda.cuEventCreate(2)
    assert cuda.status("cuEventElapsedTime", start, untimed) == 400


@on_double()
def test_copies_in_two_dimensions_are_exact(cuda: Cuda) -> None:
    cuda.cuCtxEnablePeerAccess(cuda.contexts[1], 0)
    choose = random.Random(5)
    size = 4000
    near = int(cuda.cuMemAlloc(size))
    cuda.use(1)
    far = int(cuda.cuMemAlloc(size))
    cuda.use(0)
    stream = cuda.stream()
    kinds = cuda.driver.CUmemorytype
    for _ in range(60):
        width, height = choose.randint(1, 40), choose.randint(1, 20)
        x, y = choose.randint(0, 9), choose.randint(0, 3)
        pitches = [width + x + choose.randint(0, 50) for _ in range(2)]
        given = ctypes.create_string_buffer(choose.randbytes(size), size)
        before = choose.randbytes(size)
        result = ctypes.create_string_buffer(size)
        cuda.cuMemcpyHtoD(far, before, size)
        into = cuda.driver.CUDA_MEMCPY2D()
        into.srcMemoryType, into.srcHost = kinds(1), ctypes.addressof(given)
        into.dstMemoryType, into.dstDevice = kinds(2), near
        into.srcPitch, into.dstPitch = pitches
        into.srcXInBytes, into.srcY = x, y
        into.WidthInBytes, into.Height = width, height
        cuda.cuMemcpy2DAsync(into, stream)
        onwards = cuda.driver.CUDA_MEMCPY2D()
        onwards.srcMemoryType, onwards.srcDevice = kinds(2), near
        onwards.dstMemoryType, onwards.dstDevice = kinds(4), far
        onwards.srcPitch, onwards.dstPitch = reversed(pitches)
        onwards.dstXInBytes, onwards.dstY = x, y
        onwards.WidthInBytes, onwards.Height = width, height
        cuda.cuMemcpy2DAsync(onwards, stream)
        cuda.cuMemcpyDtoHAsync(ctypes.addressof(result), far, size, stream)
        cuda.cuStreamSynchronize(stream)
        expected = bytearray(before)
        for row in range(height):
            begin = (y + row) * pitches[0] + x
            expected[begin : begin + width] = given.raw[begin : begin + width]
        assert result.raw == bytes(expected)
    into.dstPitch = width - 1
    assert cuda.status("cuMemcpy2DAsync", into, stream) == 1


@on_double()
def test_memory_is_checked(cuda: Cuda) -> None:
    stream = cuda.stream()
    memory, other = cuda.words(16), cuda.words(16)
    plain = ctypes.create_string_buffer(64)
    assert cuda.cuMemGetAddressRange(memory + 20)[1] == 64
    assert cuda.status("cuMemsetD8Async", memory + 60, 0, 5, stream) == 1
    assert cuda.status("cuMemsetD8Async", ctypes.addressof(plain), 0, 5, stream) == 1
    assert cuda.status("cuMemcpyDtoDAsync", memory, other + 32, 64, stream) == 1
    assert cuda.status("cuStreamWriteValue32", stream, memory + 64, 1, 0) == 1
    assert cuda.status("cuStreamWriteValue32", stream, memory + 1, 1, 0) == 1
    cuda.cuMemFree(other)
    assert cuda.status("cuMemFree", other) == 1
    assert cuda.status("cuMemcpyAsync", memory, other, 4, stream) == 1
    # What the driver believed is found out when it is too late.
    other = cuda.words(16)
    cuda.use(1)
    cuda.cuCtxEnablePeerAccess(cuda.contexts[0], 0)
    far = cuda.stream()
    control.stall_stream(int(far), 0.2)
    cuda.cuMemsetD8Async(other, 1, 64, far)
    cuda.cuMemFree(other)  # waits for its own device alone
    assert cuda.status("cuStreamSynchronize", far) == 700
    assert cuda.status("cuMemAlloc", 64) == 700
    cuda.use(0)
    assert cuda.status("cuStreamSynchronize", stream) == 0


@on_double(peer_writes="done")
def test_peers_need_access(cuda: Cuda) -> None:
    assert cuda.cuDeviceCanAccessPeer(0, 1) == 1
    near = cuda.words(16, value=1)
    cuda.use(1)
    far = cuda.words(16, value=2)
    cuda.use(0)
    stream = cuda.stream()
    assert cuda.status("cuStreamWriteValue32", stream, far, 1, 0) == 1
    assert cuda.status("cuMemsetD8Async", far, 0, 64, stream) == 1
    cuda.cuMemcpyPeerAsync(near, cuda.contexts[0], far, cuda.contexts[1], 64, stream)
    cuda.cuStreamSynchronize(stream)
    assert cuda.read(near, 16) == [2] * 16
    cuda.cuCtxEnablePeerAccess(cuda.contexts[1], 0)
    assert cuda.status("cuCtxEnablePeerAccess", cuda.contexts[1], 0) == 704
    cuda.cuStreamWriteValue32(stream, far, 7, 0)
    cuda.cuMemcpyAsync(near, far, 64, stream)
    cuda.cuStreamSynchronize(stream)
    assert cuda.read(near, 2) == [7, 2]
    cuda.cuCtxDisablePeerAccess(cuda.contexts[1])
    cuda.cuMemcpyAsync(near, far, 64, stream)
    assert cuda.status("cuStreamSynchronize", stream) == 700


@on_double(peers="none")
def test_peers_may_be_out_of_reach(cuda: Cuda) -> None:
    assert cuda.cuDeviceCanAccessPeer(0, 1) == 0
    assert cuda.status("cuCtxEnablePeerAccess", cuda.contexts[1], 0) == 217


@on_double(peer_writes="done")
def test_streams_of_devices_wait_for_each_other(cuda: Cuda) -> None:
    """A ring in which each device hands what it got to the next, by memory operations alone."""
    control.jitter(3, 0.0005)
    count = len(cuda.contexts)
    data, flags, streams = [], [], []
    for device in range(count):
        cuda.use(device)
        cuda.cuCtxEnablePeerAccess(cuda.contexts[(device + 1) % count], 0)
        data.append(cuda.words(8, value=device + 1))
        flags.append(cuda.words(1))
        streams.append(cuda.stream())
    rounds = 10
    for step in range(1, rounds * count + 1):
        for device in range(count):
            cuda.use(device)
            if (step - 1) % count != device:
                continue
            after = (device + 1) % count
            if step > 1:
                cuda.cuStreamWaitValue32(streams[device], flags[device], step - 1, _EQ)
            cuda.cuMemcpyDtoDAsync(data[after], data[device], 32, streams[device])
            cuda.cuStreamWriteValue32(streams[device], flags[after], step, 0)
    for device in range(count):
        cuda.use(device)
        cuda.cuStreamSynchronize(streams[device])
        assert cuda.read(data[device], 8) == [1] * 8
    assert control.count("memcpy") == rounds * count + count  # and those of read
    cuda.use(0)
    control.stall_stream(int(streams[0]), 0.05)
    done = cuda.cuEventCreate(2)
    cuda.cuEventRecord(done, streams[0])
    cuda.use(1)
    cuda.cuStreamWaitEvent(streams[1], done, 0)
    cuda.cuStreamSynchronize(streams[1])
    assert cuda.status("cuEventQuery", done) == 0


@on_double()
def test_memory_operations_compare_as_cuda_does(cuda: Cuda) -> None:
    words, address = cuda.host_words(1)
    stream = cuda.stream()
    for comparison, value, blocked, free in (
        (_GEQ, 5, 4, 6),
        (_GEQ, 2, 0xFFFFFFFF, 2),  # the difference is signed
        (_EQ, 5, 6, 5),
        (_AND, 6, 9, 4),
        (_NOR, 0xFFFF0000, 0x0000FFFF, 0x0000FFFE),
    ):
        words[0] = blocked
        cuda.cuStreamWaitValue32(stream, address, value, comparison)
        time.sleep(0.01)
        assert cuda.status("cuStreamQuery", stream) == 600
        words[0] = free
        cuda.cuStreamSynchronize(stream)
    assert cuda.status("cuStreamWaitValue32", stream, address, 1, _FLUSH) == 801
    assert cuda.status("cuStreamWriteValue32", stream, address, 1, 1) == 1
    operations = []
    for i in range(256):
        operation = cuda.driver.CUstreamBatchMemOpParams()
        operation.operation = cuda.driver.CUstreamBatchMemOpType(2 if i % 2 == 0 else 1)
        part = operation.writeValue if i % 2 == 0 else operation.waitValue
        part.operation, part.address, part.value = operation.operation, address, i // 2
        part.flags = 0 if i % 2 == 0 else _EQ
        operations.append(operation)
    cuda.cuStreamBatchMemOp(stream, 256, operations, 0)
    cuda.cuStreamSynchronize(stream)
    assert words[0] == 127
    assert cuda.status("cuStreamBatchMemOp", stream, 257, [*operations, operations[0]], 0) == 1


@on_double()
def test_graphs_do_what_was_captured(cuda: Cuda) -> None:
    main, side, outside = cuda.stream(), cuda.stream(), cuda.stream()
    source, target, flag = cuda.words(4), cuda.words(4), cuda.words(1)
    fork, join = cuda.cuEventCreate(2), cuda.cuEventCreate(2)
    calls: list[int] = []
    cuda.capture(main)
    cuda.cuMemcpyDtoDAsync(target, source, 16, main)
    cuda.cuEventRecord(fork, main)
    cuda.cuStreamWaitEvent(side, fork, 0)
    assert int(cuda.cuStreamIsCapturing(side)) == 1
    # Each branch waits for the other, so that both must run at the same time.
    cuda.cuStreamWaitValue32(main, flag, 1, _EQ)
    cuda.cuStreamWriteValue32(main, flag, 2, 0)
    cuda.cuStreamWriteValue32(side, flag, 1, 0)
    cuda.cuStreamWaitValue32(side, flag, 2, _EQ)
    cuda.cuEventRecord(join, side)
    cuda.cuStreamWaitEvent(main, join, 0)
    callback = cuda.host_function(main, lambda _: calls.append(1))
    cuda.cuMemsetD32Async(flag, 0, 1, main)
    _, _, graph, last, *edges, count = cuda.cuStreamGetCaptureInfo(main)
    assert count == 1
    for given in edges:  # cuda-bindings 12 does not show them
        assert [(edge.from_port, edge.to_port, int(edge.type)) for edge in given] == [(0, 0, 0)]
    assert int(cuda.cuGraphNodeGetType(last[0])) == 2
    assert int(cuda.cuStreamEndCapture(main)) == int(graph)
    assert int(cuda.cuStreamIsCapturing(side)) == 0
    assert sorted(cuda.node_types(graph)) == [1, 2, 3, 12, 12, 12, 12]
    assert control.count("memop") == 0
    ready = cuda.cuGraphInstantiate(graph, 0)
    cuda.cuGraphDestroy(graph)
    for value in (5, 6, 7):
        cuda.cuMemsetD32Async(source, value, 4, main)
        cuda.cuGraphLaunch(ready, main)
        cuda.cuEventRecord(join, main)
        cuda.cuStreamWaitEvent(outside, join, 0)
        cuda.cuStreamSynchronize(outside)
        assert cuda.read(target, 4) == [value] * 4
        assert cuda.read(flag, 1) == [0]
    assert len(calls) == 3
    assert callback is not None
    cuda.cuGraphExecDestroy(ready)
    assert cuda.status("cuGraphLaunch", ready, main) == 400


@on_double()
def test_captures_refuse_what_cannot_be_captured(cuda: Cuda) -> None:
    main, side = cuda.stream(), cuda.stream()
    memory = cuda.words(4)
    event, before = cuda.cuEventCreate(2), cuda.cuEventCreate(2)
    cuda.cuEventRecord(before, side)
    cuda.cuEventSynchronize(before)

    def ended(expected: int) -> None:
        assert cuda.status("cuStreamEndCapture", main) == expected
        assert int(cuda.cuStreamIsCapturing(side)) == 0

    assert cuda.status("cuStreamEndCapture", main) == 401
    for call, arguments, status in (
        ("cuStreamSynchronize", (main,), 900),
        ("cuStreamQuery", (main,), 900),
        ("cuStreamQuery", (side,), 900),
        ("cuEventQuery", (before,), 900),
        ("cuMemAlloc", (16,), 900),
        ("cuMemFree", (memory,), 900),
        ("cuCtxSynchronize", (), 900),
        ("cuStreamWaitEvent", (main, before, 0), 905),
    ):
        cuda.capture(main)
        assert cuda.status(call, *arguments) == status, call
        assert cuda.status("cuMemsetD8Async", memory, 0, 4, main) == 901
        ended(901)
    # Only the captured streams themselves are refused in relaxed mode.
    cuda.capture(main, mode=2)
    assert cuda.status("cuEventQuery", before) == 0
    assert cuda.status("cuStreamSynchronize", side) == 0
    ended(0)
    cuda.capture(main)
    cuda.cuEventRecord(event, main)
    assert cuda.status("cuEventQuery", event) == 907
    ended(901)
    assert cuda.status("cuEventQuery", event) == 1
    cuda.capture(main)
    cuda.cuEventRecord(event, main)
    cuda.cuStreamWaitEvent(side, event, 0)
    cuda.cuMemsetD8Async(memory, 0, 4, side)
    ended(904)
    cuda.capture(main)
    cuda.cuEventRecord(event, main)
    cuda.cuStreamWaitEvent(side, event, 0)
    assert cuda.status("cuStreamEndCapture", side) == 903
    ended(901)
    cuda.capture(main)
    cuda.capture(side)
    cuda.cuEventRecord(event, main)
    assert cuda.status("cuStreamWaitEvent", side, event, 0) == 902
    assert cuda.status("cuStreamEndCapture", side) == 901
    ended(901)


@on_double(single_queue=1, fail="cuEventCreate:1:2,cuMemGetInfo:0:999", copy_delay="0.4:2")
def test_faults_may_come_from_the_environment(cuda: Cuda) -> None:
    words, address = cuda.host_words(1)
    waiting, writing = cuda.stream(), cuda.stream()
    cuda.cuStreamWaitValue32(waiting, address, 1, _GEQ)
    cuda.cuStreamWriteValue32(writing, address, 1, 0)
    time.sleep(0.1)
    assert cuda.status("cuStreamQuery", writing) == 600
    words[0] = 1
    cuda.cuStreamSynchronize(writing)
    assert [cuda.status("cuEventCreate", 0) for _ in range(3)] == [0, 2, 0]
    assert cuda.status("cuMemGetInfo") == 999
    memory = int(cuda.cuMemAlloc(64))
    for slow in (False, True):
        begin = time.monotonic()
        cuda.read(memory, 16)
        assert (time.monotonic() - begin > 0.35) is slow


@on_double()
def test_faults_are_those_asked_for(cuda: Cuda) -> None:
    stream = cuda.stream()
    memory = cuda.words(16, value=3)
    control.reset()
    control.fail_call("cuMemcpyAsync", 719, skip=1)
    for status in (0, 719, 0):
        assert cuda.status("cuMemcpyAsync", memory, memory + 32, 32, stream) == status
    cuda.cuStreamSynchronize(stream)
    assert control.count("memcpy") == 2
    assert control.count("memcpy_bytes") == 64
    control.delay_copies(0.1, every=2)
    begin = time.monotonic()
    for _ in range(4):
        cuda.cuMemcpyAsync(memory, memory + 32, 32, stream)
    cuda.cuStreamSynchronize(stream)
    assert 0.19 < time.monotonic() - begin < 2
    control.reset()
    assert control.count("memcpy") == 0
    cuda.cuStreamWaitValue32(stream, memory, 99, _EQ)
    control.fail_stream(int(cuda.stream()), 719)
    assert cuda.status("cuStreamSynchronize", stream) == 719  # its wait gives up
    assert cuda.status("cuMemAlloc", 64) == 719
    cuda.use(1)
    cuda.words(1)
    cuda.cuDevicePrimaryCtxReset(0)
    assert int(cuda.cuDevicePrimaryCtxRetain(0)) == int(cuda.contexts[0])
    cuda.use(0)
    cuda.words(1)


@on_double()
def test_held_copies_do_not_return(cuda: Cuda) -> None:
    stream, memory = cuda.stream(), cuda.words(2, value=7)
    words, _ = cuda.host_words(1)
    done: list[int] = []

    def read() -> None:
        cuda.use(0)
        cuda.cuMemcpyDtoHAsync(ctypes.addressof(words), memory + 4, 4, stream)
        cuda.cuStreamSynchronize(stream)
        done.append(words[0])

    control.hold_copies(True)
    reader = threading.Thread(target=read)
    reader.start()
    other = cuda.stream()
    cuda.cuMemsetD32Async(memory, 9, 2, other)  # words and fills go on
    cuda.cuStreamWriteValue32(stream, memory, 3, 0)
    cuda.cuStreamSynchronize(other)
    cuda.cuStreamSynchronize(stream)
    assert not done and words[0] == 0
    control.hold_copies(False)
    reader.join(5)
    assert done == [9]


@on_double()
def test_freeing_waits_for_the_device(cuda: Cuda) -> None:
    stream = cuda.stream()
    memory = cuda.words(4)
    control.stall_stream(int(stream), 0.2)
    begin = time.monotonic()
    cuda.cuMemFree(memory)
    assert time.monotonic() - begin > 0.15


@on_double(timeout_s=5)
def test_a_process_may_end_with_blocked_streams(cuda: Cuda) -> None:
    flag = cuda.words(1)
    blocked, behind = cuda.stream(), cuda.stream()
    event = cuda.cuEventCreate(2)
    cuda.capture(blocked)
    cuda.cuStreamWaitValue32(blocked, flag, 9, _EQ)
    graph = cuda.cuStreamEndCapture(blocked)
    cuda.cuGraphLaunch(cuda.cuGraphInstantiate(graph, 0), blocked)
    cuda.cuEventRecord(event, blocked)
    cuda.cuStreamWaitEvent(behind, event, 0)
    sleeping = cuda.stream()
    callbacks = [cuda.host_function(sleeping, lambda _: time.sleep(1)) for _ in range(10)]
    time.sleep(0.05)
    assert callbacks


if __name__ == "__main__":
    globals()[sys.argv[1]](Cuda())
