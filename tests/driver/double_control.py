"""Tests on the driver's test double: running them, calling it, setting its faults.

The functions are for a process that has the double as its libcuda.so.1, or, with `use_library`, as
AMD's library. A call that is to fail is named without `_v2`. Streams are the numbers of their
handles.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_library = ["libcuda.so.1"]


def use_library(name: str) -> None:
    """Let the functions of this module call the double of this name."""
    _library[:] = [name]


def environment(folder: Path, **settings: object) -> dict[str, str]:
    """Return the environment of a process that shall have the double in `folder`.

    `settings` are those of the double, such as `devices=2` or `single_queue=1`. Stream writes to
    the memory of other devices are refused unless `peer_writes` says otherwise.
    """
    settings = {"peer_writes": "refused", **settings}
    paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    settings_of_double = {
        f"FICCO_DOUBLE_{name.upper()}": str(value) for name, value in settings.items()
    }
    return (
        os.environ
        | {"LD_LIBRARY_PATH": os.pathsep.join(path for path in paths if path)}
        | settings_of_double
    )


def _function(name: str, result: object, *arguments: object) -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(_library[0])[name]
    function.restype = result
    function.argtypes = arguments
    return function


def fail_call(function: str, status: int, skip: int = 0) -> None:
    """Let the coming call of `function` after `skip` more only return `status`, once."""
    name = "ficcoDoubleFailCall"
    call = _function(name, None, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)
    call(function.encode(), skip, status)


def fail_stream(stream: int, status: int) -> None:
    """Let the stream's context fail for good when the stream has done what it has to do."""
    call = _function("ficcoDoubleFailStream", ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    assert call(stream, status) == 0


def stall_stream(stream: int, seconds: float) -> None:
    """Let the stream pause when it has done what it has to do."""
    call = _function("ficcoDoubleStallStream", ctypes.c_int, ctypes.c_void_p, ctypes.c_double)
    assert call(stream, seconds) == 0


def delay_copies(seconds: float, every: int = 1) -> None:
    """Let every `every`-th copy pause first; 0 seconds end this."""
    call = _function("ficcoDoubleDelayCopies", None, ctypes.c_double, ctypes.c_int)
    call(seconds, every)


def hold_copies(on: bool) -> None:
    """Let no call that copies return, as while a kernel is loaded behind a stream's wait."""
    _function("ficcoDoubleHoldCopies", None, ctypes.c_int)(int(on))


def jitter(seed: int, max_seconds: float) -> None:
    """Let every operation of every stream pause for a random time first."""
    _function("ficcoDoubleJitter", None, ctypes.c_uint, ctypes.c_double)(seed, max_seconds)


def single_queue(on: bool) -> None:
    """Let streams made from now on share a queue per context, whatever their priority."""
    _function("ficcoDoubleSingleQueue", None, ctypes.c_int)(int(on))


def count(kind: str) -> int:
    """Return how much was done of something.

    Kinds are "memcpy", "memcpy_bytes", "memset", "memop", "host", "graph", "kernel", "tensormap",
    "cubin", "stored", of words that kernels store, and "context", of those that are not primary.
    """
    return int(_function("ficcoDoubleCounts", ctypes.c_ulonglong, ctypes.c_char_p)(kind.encode()))


def record(on: bool) -> None:
    """Begin an empty log of the work that is given to streams, or end it."""
    _function("ficcoDoubleRecord", None, ctypes.c_int)(int(on))


def recorded() -> dict[int, list[str]]:
    """Return the log by stream: a line for each call, in order.

    Lines are "copy TARGET SOURCE ROWS ROW_BYTES", "store ADDRESS=VALUE ...", "host", "kernel",
    "record EVENT", "await EVENT", and for a batch of memory operations "wait ADDRESS VALUE; write
    ADDRESS VALUE; ...".
    """
    text: bytes = _function("ficcoDoubleRecorded", ctypes.c_char_p)()
    lines: dict[int, list[str]] = {}
    for line in text.decode().splitlines():
        stream, what = line.split(" ", 1)
        lines.setdefault(int(stream), []).append(what)
    return lines


def contexts_apart() -> int:
    """Return how many contexts of all devices there are that are not primary ones."""
    return int(_function("ficcoDoubleContextsApart", ctypes.c_int)())


def reset() -> None:
    """End all faults but those of the environment, and set all counts to 0."""
    _function("ficcoDoubleReset", None)()


Kernel = Callable[[list[int], tuple[int, ...]], None]
_HOST_KERNEL = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_uint)
)
_kernels: list[Any] = []  # for ever, as the double may still run them


def kernel(parameter_bytes: list[int], run: Kernel) -> int:
    """Return the handle of a kernel, in place of which the double runs a Python function.

    Args:
        parameter_bytes: of every parameter.
        run: gets the address of every parameter, and grid (3), threads, bytes of shared memory.
            The double does not see what it raises.
    """

    def call(parameters: Any, shape: Any) -> None:
        run([parameters[i] for i in range(len(parameter_bytes))], tuple(shape[:5]))

    _kernels.append(_HOST_KERNEL(call))
    count_type = ctypes.c_size_t * len(parameter_bytes)
    make = _function("ficcoDoubleKernel", ctypes.c_void_p, count_type, ctypes.c_int, _HOST_KERNEL)
    return int(make(count_type(*parameter_bytes), len(parameter_bytes), _kernels[-1]))


def stand_in(function: int, parameters: int, run: Kernel) -> None:
    """Let the double run a Python function in place of a kernel of a cubin that is loaded.

    Args:
        function: the kernel's handle.
        parameters: how many it takes.
        run: as `kernel` has it.
    """

    def call(addresses: Any, shape: Any) -> None:
        run([addresses[i] for i in range(parameters)], tuple(shape[:5]))

    _kernels.append(_HOST_KERNEL(call))
    stand = _function("ficcoDoubleStandIn", ctypes.c_int, ctypes.c_void_p, _HOST_KERNEL)
    assert stand(function, _kernels[-1]) == 0


class Cuda:
    """The functions of cuda-bindings, which raise where the status is not 0, and what tests need.

    All devices have their primary contexts; that of device 0 is current.
    """

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.driver = driver
        self.cuInit(0)
        self.contexts = [
            self.cuDevicePrimaryCtxRetain(device) for device in range(self.cuDeviceGetCount())
        ]
        self.use(0)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: object) -> Any:
            status, *values = getattr(self.driver, name)(*arguments)
            assert int(status) == 0, f"{name}: {status!r}"
            return values[0] if len(values) == 1 else tuple(values)

        return call

    def status(self, name: str, *arguments: object) -> int:
        """Call a function that may be refused."""
        return int(getattr(self.driver, name)(*arguments)[0])

    def use(self, device: int) -> None:
        """Make the context of a device current."""
        self.cuCtxSetCurrent(self.contexts[device])

    def stream(self, priority: int = 0) -> Any:
        """Make a stream of the current device."""
        return self.cuStreamCreateWithPriority(1, priority)

    def words(self, count: int, value: int = 0) -> int:
        """Allocate words of 32 bits on the current device."""
        address = int(self.cuMemAlloc(4 * count))
        self.cuMemsetD32(address, value, count)
        return address

    def host_words(self, count: int) -> tuple[ctypes.Array[ctypes.c_uint32], int]:
        """Allocate words of the host that streams reach, too; return them and their address."""
        memory = int(self.cuMemHostAlloc(4 * count, 3))
        words = (ctypes.c_uint32 * count).from_address(memory)
        words[:] = [0] * count
        return words, int(self.cuMemHostGetDevicePointer(memory, 0))

    def read(self, address: int, count: int) -> list[int]:
        """Copy words from a device."""
        words = (ctypes.c_uint32 * count)()
        self.cuMemcpyDtoH(ctypes.addressof(words), address, 4 * count)
        return list(words)

    def host_function(self, stream: Any, function: Callable[[Any], None]) -> Any:
        """Enqueue a Python function; what is returned must live until it has run."""
        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        # Not by cuda-bindings, which allows one run only, even of a node of a graph.
        launch = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
        assert launch(ctypes.c_void_p(int(stream)), callback, None) == 0
        return callback

    def capture(self, stream: Any, mode: int = 0) -> None:
        """Begin a capture: global, of the thread, or relaxed."""
        self.cuStreamBeginCapture(stream, self.driver.CUstreamCaptureMode(mode))

    def node_types(self, graph: Any) -> list[int]:
        """Return the types of a graph's nodes."""
        nodes, _ = self.cuGraphGetNodes(graph, self.cuGraphGetNodes(graph)[1])
        return [int(self.cuGraphNodeGetType(node)) for node in nodes]


def on_double(timeout_s: float = 20, **settings: object) -> Callable[..., Any]:
    """Run a test in a child process that has the double, with these settings, as its driver.

    The test's file must, when it is run, call the test named by its first argument with a `Cuda`.
    """

    def decorate(body: Callable[[Cuda], None]) -> Callable[..., None]:
        if body.__module__ == "__main__":
            return body

        def test(double_folder: Path) -> None:
            done = subprocess.run(
                [sys.executable, "-X", "faulthandler", body.__code__.co_filename, body.__name__],
                env=environment(double_folder, **settings),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout_s,
                check=False,
            )
            assert done.returncode == 0, f"exit {done.returncode}: {done.stdout}"

        test.__name__ = body.__name__
        test.__doc__ = body.__doc__
        return test

    return decorate
