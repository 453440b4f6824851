"""Faults and counts of the driver's test double, from a process that has it as libcuda.so.1.

A call that is to fail is named without `_v2`. Streams are the numbers of their handles.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def environment(folder: Path, **settings: object) -> dict[str, str]:
    """Return the environment of a process that shall have the double in `folder`.

    `settings` are those of the double, such as `devices=2` or `single_queue=1`.
    """
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
    function = ctypes.CDLL("libcuda.so.1")[name]
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


def jitter(seed: int, max_seconds: float) -> None:
    """Let every operation of every stream pause for a random time first."""
    _function("ficcoDoubleJitter", None, ctypes.c_uint, ctypes.c_double)(seed, max_seconds)


def single_queue(on: bool) -> None:
    """Let streams made from now on share a queue per device, unless they have a priority."""
    _function("ficcoDoubleSingleQueue", None, ctypes.c_int)(int(on))


def count(kind: str) -> int:
    """Return how much was done of "memcpy", "memcpy_bytes", "memset", "memop", "host", "graph"."""
    return int(_function("ficcoDoubleCounts", ctypes.c_ulonglong, ctypes.c_char_p)(kind.encode()))


def reset() -> None:
    """End all faults but those of the environment, and set all counts to 0."""
    _function("ficcoDoubleReset", None)()
