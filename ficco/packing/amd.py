"""Compiles the kernels for AMD's devices; no device is needed.

python -m ficco.packing --amd      # writes the code objects into ficco/kernels/packs
"""

from __future__ import annotations

import importlib
import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ficco.kernels import amd_code
from ficco.kernels.amd_code import ARCHITECTURES, AWAITED, THREADS, path_of

__all__ = ["WAVEFRONT", "compiled", "without_lines", "write"]

WAVEFRONT = 64


class _Kernel(NamedTuple):
    """A kernel: its module in `ficco.kernels`, and the types of its arguments."""

    module: str
    signature: dict[str, Any]


_KERNELS = {
    amd_code.AWAIT_ENTRY: _Kernel(
        "await_words_amd_kernel",
        {
            "at": ("i64",) * AWAITED, "values": ("i32",) * AWAITED, "numbers": ("i32",) * AWAITED,
            "stop": "*i32", "lane": "*i32", "missed": "*i32", "first": "i64", "second": "i64",
            "size": "i64", "limit": "i64", "mark": "i32", "count": "i32",
        },
    ),
    amd_code.HOLD_ENTRY: _Kernel(
        "probe_amd_kernel",
        {"begun": "*i32", "go": "*i32", "limit": "i64"},
    ),
    amd_code.COMPARE_ENTRY: _Kernel(
        "probe_amd_kernel",
        {"data": "*i32", "count": "i64", "value": "i64", "wrong": "*i32"},
    ),
}  # fmt: skip


def compiled(entry: str, arch: str) -> Any:
    """Return a kernel, compiled by Triton; see `code_object_of`."""
    from ficco.private.triton_core import compile_for_amd

    kernel = _KERNELS[entry]
    source = getattr(importlib.import_module(f"ficco.kernels.{kernel.module}"), entry)
    with without_lines():
        options = {"num_warps": THREADS[entry] // WAVEFRONT}
        return compile_for_amd(source, kernel.signature, arch, WAVEFRONT, options)


@contextmanager
def without_lines() -> Iterator[None]:
    """Compile anew, and without the names of source files, which depend on the machine."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_CACHE_DIR": folder}
        before = {name: os.environ.get(name) for name in settings}
        os.environ |= settings
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def write() -> None:
    """Write the code objects of all architectures into the package."""
    from ficco.private.triton_core import code_object_of

    for entry, arch in itertools.product(_KERNELS, ARCHITECTURES):
        path = path_of(entry, arch)
        path.write_bytes(code_object_of(compiled(entry, arch))[0])
        print(f"{path}: {path.stat().st_size} bytes")
