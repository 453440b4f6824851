"""Compiles the kernels for AMD's devices; no device is needed.

python -m ficco.packing --amd      # writes the code objects into ficco/kernels/packs
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ficco.kernels.amd_code import ARCHITECTURES, AWAITED, path_of

__all__ = ["compiled", "write"]

_WARPS, _WAVEFRONT = 1, 64


def compiled(arch: str) -> Any:
    """Return the kernel that waits for signals, compiled by Triton; see `code_object_of`."""
    from ficco.kernels.await_words_amd_kernel import ficco_await_words
    from ficco.private.triton_core import compile_for_amd

    signature = {
        "at": ("i64",) * AWAITED, "values": ("i32",) * AWAITED, "numbers": ("i32",) * AWAITED,
        "stop": "*i32", "lane": "*i32", "missed": "*i32", "first": "i64", "second": "i64",
        "size": "i64", "limit": "i64", "mark": "i32", "count": "i32",
    }  # fmt: skip
    with _without_lines():
        return compile_for_amd(ficco_await_words, signature, arch, _WAVEFRONT, _WARPS)


@contextmanager
def _without_lines() -> Iterator[None]:
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

    for arch in ARCHITECTURES:
        path_of(arch).write_bytes(code_object_of(compiled(arch))[0])
        print(f"{path_of(arch)}: {path_of(arch).stat().st_size} bytes")
