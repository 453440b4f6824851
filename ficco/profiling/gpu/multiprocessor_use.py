"""Measurement of the driver calls that need a multiprocessor, while a kernel holds all of them.

The kernel fills every thread slot of a GPU until the host releases it. A call that ends meanwhile
runs on a copy engine or in the front end; a call that does not end waits for a multiprocessor.
Holding the shared memory instead proves nothing, because the driver's own kernels need none.

While the kernel runs, all other work of the GPU waits, also that of other processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ficco.errors import EngineError
from ficco.kernels.probe_code import PTX
from ficco.profiling.gpu import driver as commands
from ficco.profiling.gpu.driver import WordCommand, bindings, writes_reach_peers

__all__ = ["CONTROL", "WRITE_AT_PEER", "Use", "probe"]

CONTROL = "kernel of one thread"  # this always needs a multiprocessor
WRITE_AT_PEER = "write of a word at a peer"

LIMIT_NS = 5_000_000_000  # time limit after which the kernel ends by itself
_HELD_S = 2.0  # time limit until all blocks run
_BETWEEN_S = 1e-4  # looks at what has run
_ENDS_S = 0.25  # a call that takes longer waits; the largest copy takes 0.2 ms
_MIB, _KIB = 1 << 20, 1 << 10
_LARGE = 64 * _MIB
_ROWS, _ROW_BYTES = 4096, _KIB
_NON_BLOCKING, _NO_TIMING, _RELAXED = 1, 2, 2
_MAPPED_PORTABLE = 3
_NOT_READY, _REACHED_ALREADY = 600, 704
_THREADS_OF_BLOCK, _PROCESSORS, _THREADS_OF_PROCESSOR = 1, 16, 39  # CU_DEVICE_ATTRIBUTE_...


class Use(NamedTuple):
    """Whether a call needs a multiprocessor, on a stream and as a node of a graph."""

    eager: bool
    in_graph: bool


class _Here(NamedTuple):
    """Memory of the device, of a peer (0: there is none) and of the host, and the stream."""

    own: int
    other: int
    peer: int
    host: int
    stream: int


def probe(device: int = 0, peer: int | None = None) -> dict[str, Use]:
    """Measure which calls of a device need one of its multiprocessors.

    Everything is loaded and allocated before the kernel starts, because loading a kernel may wait
    for the device. The measurement takes about three seconds and synchronizes the device.

    Args:
        device: the driver's number of the device.
        peer: a device that it reaches; None: calls with a peer are left out.

    Returns:
        The use of each call, in a fixed order.

    Raises:
        EngineError: cuda-bindings is missing, a driver call fails, other work prevents the kernel
            from filling the device, or CONTROL ends, which shows that the device was not filled.
    """
    with contextlib.ExitStack() as stack:
        holder = _Holder(device, stack)
        here = _memory(device, peer, holder, stack)
        calls = _calls(here, holder)
        graphs = {name: _captured(call, here.stream, stack) for name, call in calls.items()}
        for name, call in calls.items():  # load everything that they need
            call()
            _call("cuGraphLaunch", graphs[name], here.stream)
        _call("cuStreamSynchronize", here.stream)
        uses = {}
        for name, call in calls.items():
            eager = holder.waits(call, here.stream)

            def replay(graph: Any = graphs[name]) -> None:
                _call("cuGraphLaunch", graph, here.stream)

            uses[name] = Use(eager, holder.waits(replay, here.stream))
    if uses[CONTROL] != Use(True, True):
        raise EngineError(
            f"measuring GPU {device}: a {CONTROL} ended although all thread slots should be held, "
            "so the measurement is invalid; run it where no debugger or MPS limits the GPU"
        )
    return uses


class _Holder:
    """The kernel that holds all multiprocessors of a device, whose context becomes current."""

    def __init__(self, device: int, stack: contextlib.ExitStack) -> None:
        _call("cuInit", 0)
        self.device = device
        handle = _call("cuDeviceGet", device)
        self.context = _call("cuDevicePrimaryCtxRetain", handle)
        stack.callback(_call, "cuDevicePrimaryCtxRelease", handle)
        _call("cuCtxPushCurrent", self.context)
        stack.callback(_call, "cuCtxPopCurrent")
        kinds = bindings().CUdevice_attribute
        most, processors, threads = (
            int(_call("cuDeviceGetAttribute", kinds(kind), handle))
            for kind in (_THREADS_OF_BLOCK, _PROCESSORS, _THREADS_OF_PROCESSOR)
        )
        blocks = -(-threads // most)  # of a multiprocessor
        self.blocks, self.threads = processors * blocks, threads // blocks
        self._text = ctypes.create_string_buffer(PTX.encode())
        module = _call("cuModuleLoadData", ctypes.addressof(self._text))
        stack.callback(_call, "cuModuleUnload", module)
        self._hold = _call("cuModuleGetFunction", module, b"ficco_hold")
        self._one = _call("cuModuleGetFunction", module, b"ficco_one")
        memory = int(_call("cuMemHostAlloc", 4 * (self.blocks + 1), _MAPPED_PORTABLE))
        stack.callback(_call, "cuMemFreeHost", memory)
        self._words = (ctypes.c_uint32 * (self.blocks + 1)).from_address(memory)
        self._begun = int(_call("cuMemHostGetDevicePointer", memory, 0))
        self._stream = new_stream(stack)
        self._held = new_event(stack)
        self._ended = new_event(stack)
        self._words[self.blocks] = 1  # load the kernel by a launch that ends at once
        self._launch()
        _call("cuStreamSynchronize", self._stream)

    def _launch(self) -> None:
        go = self._begun + 4 * self.blocks
        _launch(self._hold, self.blocks, self.threads, (self._begun, go, LIMIT_NS), self._stream)
        _call("cuEventRecord", self._held, self._stream)

    def one(self, word: int, stream: int) -> None:
        """Enqueue a kernel of one thread, which writes a word."""
        _launch(self._one, 1, 1, (word,), stream)

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        """Hold all multiprocessors during the `with` block."""
        for index in range(self.blocks + 1):
            self._words[index] = 0
        self._launch()
        try:
            end = time.monotonic() + _HELD_S
            while (running := sum(self._words[: self.blocks])) < self.blocks:
                if time.monotonic() > end:
                    raise EngineError(
                        f"measuring GPU {self.device}: {running} of {self.blocks} blocks run after "
                        f"{_HELD_S:g} s, other work uses the rest; stop it, and measure again"
                    )
                time.sleep(_BETWEEN_S)
            yield
            if not self._pending(self._held):
                raise EngineError(
                    f"measuring GPU {self.device}: the holding kernel reached its time limit of "
                    f"{LIMIT_NS / 1e9:g} s; measure again on a less busy host"
                )
        finally:
            self._words[self.blocks] = 1
            _call("cuStreamSynchronize", self._stream)

    def waits(self, call: Callable[[], None], stream: int) -> bool:
        """Return whether a call waits while all multiprocessors are held."""
        try:
            with self._holding():
                call()
                _call("cuEventRecord", self._ended, stream)
                end = time.monotonic() + _ENDS_S
                while pending := self._pending(self._ended):
                    if time.monotonic() > end:
                        break
                    time.sleep(_BETWEEN_S)
        finally:
            _call("cuStreamSynchronize", stream)
        return pending

    def _pending(self, event: Any) -> bool:
        (status, *_) = bindings().cuEventQuery(event)
        if int(status) not in (0, _NOT_READY):
            raise _refused("cuEventQuery", status)
        return int(status) == _NOT_READY


def _calls(here: _Here, holder: _Holder) -> dict[str, Callable[[], None]]:
    """Return the calls to measure, by name; each enqueues one command."""
    own, other, peer, host, stream = here
    box = (_ROWS, _ROW_BYTES)
    sizes = {"4 B": 4, "64 B": 64, "16 KiB": 16 * _KIB, "64 KiB": 64 * _KIB, "64 MiB": _LARGE}
    rows = f"{_ROWS} x {_ROW_BYTES // _KIB} KiB"

    def copy(target: int, name: str) -> Callable[[], None]:
        return lambda: commands.copy(target, own, sizes[name], stream)

    def copy_rows(target: int) -> Callable[[], None]:
        return lambda: commands.copy_rows(target, 2 * _ROW_BYTES, own, 2 * _ROW_BYTES, box, stream)

    def write(word: int) -> Callable[[], None]:
        return lambda: commands.words([WordCommand(False, word, 1)], stream)

    calls: dict[str, Callable[[], None]] = {}
    if peer:
        for name in ("4 B", "64 B", "16 KiB", "64 MiB"):
            calls[f"copy to a peer, {name}"] = copy(peer, name)
        calls[f"copy of rows to a peer, {rows}"] = copy_rows(peer)
        if writes_reach_peers():  # a forbidden write may destroy the context
            with contextlib.suppress(EngineError):  # if the driver refuses it, skip the call
                write(peer)()
                calls[WRITE_AT_PEER] = write(peer)
    calls["write of a word"] = write(own)
    calls["copy to the host, 64 KiB"] = copy(host, "64 KiB")
    calls["memset, 4 B"] = lambda: _call("cuMemsetD32Async", own, 0, 1, stream)
    for name in ("4 B", "64 KiB", "64 MiB"):
        calls[f"copy within the device, {name}"] = copy(other, name)
    calls[f"copy of rows within the device, {rows}"] = copy_rows(other)
    calls[CONTROL] = lambda: holder.one(own, stream)
    return calls


def _memory(device: int, peer: int | None, holder: _Holder, stack: contextlib.ExitStack) -> _Here:
    """Allocate the memory and the stream of the calls."""
    own, other = (_allocated(_LARGE, stack) for _ in range(2))
    host = int(_call("cuMemHostAlloc", 64 * _KIB, _MAPPED_PORTABLE))
    stack.callback(_call, "cuMemFreeHost", host)
    peer_memory = 0
    if peer is not None:
        handle = _call("cuDeviceGet", peer)
        if not _call("cuDeviceCanAccessPeer", _call("cuDeviceGet", device), handle):
            raise EngineError(f"measuring GPU {device}: it does not reach GPU {peer}; name another")
        context = _call("cuDevicePrimaryCtxRetain", handle)
        stack.callback(_call, "cuDevicePrimaryCtxRelease", handle)
        (status, *_) = bindings().cuCtxEnablePeerAccess(context, 0)
        if int(status) not in (0, _REACHED_ALREADY):
            raise _refused("cuCtxEnablePeerAccess", status)
        _call("cuCtxPushCurrent", context)
        try:
            peer_memory = int(_call("cuMemAlloc", _LARGE))
        finally:
            _call("cuCtxPopCurrent")
        stack.callback(_free_in, context, peer_memory)
    return _Here(own, other, peer_memory, host, int(new_stream(stack)))


def _allocated(size: int, stack: contextlib.ExitStack) -> int:
    address = int(_call("cuMemAlloc", size))
    stack.callback(_call, "cuMemFree", address)
    return address


def _free_in(context: Any, address: int) -> None:
    _call("cuCtxPushCurrent", context)
    try:
        _call("cuMemFree", address)
    finally:
        _call("cuCtxPopCurrent")


def new_stream(stack: contextlib.ExitStack) -> Any:
    """Return a stream that does not synchronize with the default stream."""
    stream = _call("cuStreamCreate", _NON_BLOCKING)
    stack.callback(_call, "cuStreamDestroy", stream)
    return stream


def new_event(stack: contextlib.ExitStack) -> Any:
    """Return an event without timing."""
    event = _call("cuEventCreate", _NO_TIMING)
    stack.callback(_call, "cuEventDestroy", event)
    return event


def _captured(call: Callable[[], None], stream: int, stack: contextlib.ExitStack) -> Any:
    """Return an executable graph of one call."""
    _call("cuStreamBeginCapture", stream, bindings().CUstreamCaptureMode(_RELAXED))
    try:
        call()
    finally:
        graph = _call("cuStreamEndCapture", stream)
    executable = _call("cuGraphInstantiate", graph, 0)
    _call("cuGraphDestroy", graph)
    stack.callback(_call, "cuGraphExecDestroy", executable)
    return executable


def _launch(
    function: Any, blocks: int, threads: int, arguments: tuple[int, ...], stream: Any
) -> None:
    parameters = (arguments, (ctypes.c_uint64,) * len(arguments))
    _call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, 0)


def _call(name: str, *arguments: Any) -> Any:
    """Call the driver; return its result, if any, or raise EngineError."""
    status, *results = getattr(bindings(), name)(*arguments)
    if int(status) != 0:
        raise _refused(name, status)
    return results[0] if results else None


def _refused(name: str, status: Any) -> EngineError:
    return EngineError(
        f"measuring which calls need multiprocessors: {name} returned {status.name} ({int(status)})"
    )
