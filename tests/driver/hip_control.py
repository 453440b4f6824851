"""Tests on the double of AMD's library: running them, and calling it by ctypes."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import double_control as control

LIBRARY = "libamdhip64.so.7"
NO_CU = 1024  # hipMemcpyDeviceToDeviceNoCU


class Hip:
    """The functions of HIP, which raise where the status is not 0. Device 0 is current."""

    def __init__(self) -> None:
        control.use_library(LIBRARY)
        self.library = ctypes.CDLL(LIBRARY)

    def status(self, name: str, *arguments: object) -> int:
        """Call a function that may be refused. Integers are passed as 64 bits."""
        return int(
            self.library[name](
                *[ctypes.c_ssize_t(each) if isinstance(each, int) else each for each in arguments]
            )
        )

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            status = self.status(name, *arguments)
            assert status == 0, f"{name}: {status}"

        return call

    def new(self, name: str, *arguments: object) -> int:
        """Call a function whose first argument is the place of its result, and return that."""
        made = ctypes.c_size_t()
        getattr(self, name)(ctypes.byref(made), *arguments)
        return made.value

    def number(self, name: str, *arguments: object) -> int:
        """Return the number that a function tells by its first argument."""
        told = ctypes.c_int()
        getattr(self, name)(ctypes.byref(told), *arguments)
        return told.value

    def stream(self, priority: int = 0) -> int:
        return self.new("hipStreamCreateWithPriority", 1, priority)

    def memory(self, words: int, flags: int = 1, value: int = 0) -> int:
        """Allocate words of the current device, fine-grained, in which every byte is `value`."""
        address = self.new("hipExtMallocWithFlags", 4 * words, flags)
        self.hipMemset(address, value, 4 * words)
        return address

    def copy(self, target: int, source: int, count: int, stream: int, kind: int = NO_CU) -> None:
        """Enqueue a copy of words."""
        self.hipMemcpyAsync(target, source, 4 * count, kind, stream)

    def read(self, address: int, count: int) -> list[int]:
        words = (ctypes.c_uint32 * count)()
        self.hipMemcpy(words, address, 4 * count, 2)
        return list(words)

    def allow_peers(self) -> None:
        """Let all devices reach each other."""
        count = self.number("hipGetDeviceCount")
        for device in range(count):
            self.hipSetDevice(device)
            for peer in range(count):
                if peer != device:
                    self.hipDeviceEnablePeerAccess(peer, 0)
        self.hipSetDevice(0)

    def launch(self, kernel: int, stream: int, *addresses: int) -> None:
        """Launch a kernel of `control.kernel` with one block of 64 threads."""
        values = [ctypes.c_uint64(address) for address in addresses]
        parameters = (ctypes.c_void_p * max(len(values), 1))(*map(ctypes.addressof, values))
        self.hipModuleLaunchKernel(kernel, 1, 1, 1, 64, 1, 1, 0, stream, parameters, None)


def stand_in(kernel: int, sizes: list[int], run: control.Kernel) -> None:
    """Let the double run a Python function in place of a kernel of a code object.

    Args:
        kernel: its handle.
        sizes: bytes of every parameter.
        run: as `control.kernel` has it.
    """

    def call(parameters: Any, shape: Any) -> None:
        run([parameters[i] for i in range(len(sizes))], tuple(shape[:5]))

    control._kernels.append(control._HOST_KERNEL(call))
    table = ctypes.c_size_t * len(sizes)
    stand = control._function(
        "ficcoDoubleStandInWith", ctypes.c_int, ctypes.c_void_p, table, ctypes.c_int,
        control._HOST_KERNEL,
    )  # fmt: skip
    assert stand(kernel, table(*sizes), len(sizes), control._kernels[-1]) == 0


def run(file: str, *arguments: str, env: dict[str, str], timeout_s: float = 20) -> str:
    """Run a Python file, which must end well, and return what it says."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", file, *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stdout}"
    return done.stdout


def refusal(call: Callable[..., object], *arguments: object) -> str:
    """Return the message of the GpuError that a call of the native module raises."""
    from ficco import _native

    try:
        call(*arguments)
    except _native.GpuError as error:
        return str(error)
    raise AssertionError("it raises no GpuError")


def on_hip_double(needs: str = "", **settings: object) -> Callable[..., Any]:
    """Run a test in a child process that has the double, with these settings, as its library.

    The test's file must, when it is run, call the test named by its first argument with a `Hip`. It
    should not import pytest, which takes longer than most tests. The test is skipped where the
    module that it `needs` is not installed.
    """

    def decorate(body: Callable[[Hip], None]) -> Callable[..., None]:
        if body.__module__ == "__main__":
            return body

        def test(hip_folder: Path) -> None:
            if needs and importlib.util.find_spec(needs) is None:
                import pytest

                pytest.skip(f"the module {needs} is not installed")
            env = control.environment(hip_folder / "hip_double", **settings)
            run(body.__code__.co_filename, body.__name__, env=env)

        test.__name__ = body.__name__
        test.__doc__ = body.__doc__
        return test

    return decorate
