"""Contexts of the driver's test double, and the hardware queues that their streams share.

Each test runs in a process of its own, as those of test_double.py.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time

import double_control as control
from double_control import Cuda, on_double

# CUstreamWaitValue_flags
_GEQ, _EQ = 0, 1


@on_double()
def test_contexts_are_needed(cuda: Cuda) -> None:
    stream = cuda.stream()
    cuda.cuCtxSetCurrent(cuda.driver.CUcontext(0))
    assert cuda.status("cuMemAlloc", 64) == 201
    assert cuda.status("cuEventCreate", 0) == 201
    assert cuda.status("cuStreamQuery", 0) == 201
    assert cuda.status("cuStreamQuery", stream) == 0  # knows its context
    cuda.cuCtxPushCurrent(cuda.contexts[1])
    assert int(cuda.cuCtxGetDevice()) == 1
    assert int(cuda.cuCtxPopCurrent()) == int(cuda.contexts[1])
    cuda.cuDevicePrimaryCtxRelease(0)
    assert cuda.cuDevicePrimaryCtxGetState(0)[1] == 0
    assert cuda.status("cuCtxSetCurrent", cuda.contexts[0]) == 709
    assert cuda.status("cuStreamQuery", stream) == 400
    assert int(cuda.cuDevicePrimaryCtxRetain(0)) == int(cuda.contexts[0])


@on_double()
def test_a_single_queue_blocks_all_behind_a_wait(cuda: Cuda) -> None:
    words, address = cuda.host_words(1)
    control.single_queue(True)
    waiting, writing, urgent = cuda.stream(), cuda.stream(), cuda.stream(-1)
    control.single_queue(False)
    apart = cuda.stream()
    cuda.use(1)
    elsewhere = cuda.stream()
    cuda.cuStreamSynchronize(elsewhere)
    cuda.use(0)
    # In this order one after the other is enough.
    cuda.cuStreamWriteValue32(writing, address, 1, 0)
    cuda.cuStreamWaitValue32(waiting, address, 1, _GEQ)
    cuda.cuStreamSynchronize(waiting)
    # In this one the writes stand behind the wait for them.
    cuda.cuStreamWaitValue32(waiting, address, 2, _GEQ)
    cuda.cuStreamWriteValue32(writing, address, 2, 0)
    cuda.cuStreamWriteValue32(urgent, address, 3, 0)
    time.sleep(0.2)
    assert cuda.status("cuStreamQuery", writing) == cuda.status("cuStreamQuery", urgent) == 600
    cuda.cuStreamWriteValue32(apart, address, 2, 0)
    cuda.cuStreamSynchronize(urgent)
    assert words[0] == 3


@on_double(single_queue=1, peers="none")
def test_a_second_context_has_queues_of_its_own(cuda: Cuda) -> None:
    library = ctypes.CDLL("libcuda.so.1")
    words, memory = cuda.host_words(1)[0], cuda.words(4)
    waiting = cuda.stream()
    made, twice = ctypes.c_void_p(), ctypes.c_void_p()
    assert library.cuCtxCreate_v2(ctypes.byref(made), 0, 0) == 0
    assert int(cuda.cuCtxPopCurrent()) == made.value != int(cuda.contexts[0])
    assert library.cuCtxCreate_v2(ctypes.byref(twice), 0, 9) == 101
    cuda.cuStreamWaitValue32(waiting, memory, 7, _EQ)
    cuda.cuMemsetD32Async(ctypes.addressof(words), 5, 1, waiting)
    cuda.cuCtxPushCurrent(cuda.driver.CUcontext(made.value))
    assert int(cuda.cuCtxGetDevice()) == 0
    cuda.cuCtxSynchronize()  # waits for its own streams alone
    stream, blocked = cuda.stream(-1), cuda.stream()
    cuda.cuStreamWriteValue32(stream, memory, 7, 0)
    cuda.cuStreamSynchronize(stream)
    cuda.cuStreamSynchronize(waiting)
    assert words[0] == 5
    cuda.cuStreamWaitValue32(blocked, memory, 8, _EQ)
    cuda.cuStreamWriteValue32(stream, memory, 9, 0)  # behind it, in the context's one queue
    time.sleep(0.1)
    assert cuda.status("cuStreamQuery", stream) == 600
    cuda.use(0)
    assert control.contexts_apart() == control.count("context") == 1
    assert cuda.status("cuCtxDestroy", cuda.contexts[0]) == 201  # is a primary one
    cuda.cuCtxDestroy(cuda.driver.CUcontext(made.value))
    assert control.contexts_apart() == 0
    assert cuda.status("cuCtxPushCurrent", cuda.driver.CUcontext(made.value)) == 709
    assert cuda.status("cuStreamQuery", stream) == 400
    assert cuda.read(memory, 1) == [7]  # the device's memory stays


@on_double()
def test_no_context_ends_or_is_made_before_all_waits_have_ended(cuda: Cuda) -> None:
    library = ctypes.CDLL("libcuda.so.1")
    words, address = cuda.host_words(1)
    ended, made = [ctypes.c_void_p() for _ in range(2)], ctypes.c_void_p()
    for context in ended:
        assert library.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
        cuda.cuCtxPopCurrent()
    assert library.cuCtxDestroy_v2(ended[0]) == 0
    cuda.cuStreamWaitValue32(cuda.stream(), address, 1, _EQ)
    ending = threading.Thread(target=library.cuCtxDestroy_v2, args=(ended[1],))
    making = threading.Thread(target=library.cuCtxCreate_v2, args=(ctypes.byref(made), 0, 0))
    for thread in (ending, making):
        thread.start()
        thread.join(0.1)
    assert ending.is_alive() and making.is_alive()
    words[0] = 1
    for thread in (ending, making):
        thread.join(5)
    assert made.value and not ending.is_alive()


if __name__ == "__main__":
    globals()[sys.argv[1]](Cuda())
