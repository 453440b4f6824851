"""Compiles the kernels for AMD's devices; no device is needed.

python -m ficco.cli.packing --amd      # writes the code objects into ficco/kernels/packs
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ficco.cli.packing import building
from ficco.core import files
from ficco.kernels import amd_code, gated_amd, pack
from ficco.kernels.amd_code import ARCHITECTURES, AWAITED, THREADS, gated_path, path_of
from ficco.kernels.arrays import Address, Described, DescribedArrays
from ficco.kernels.compiling import options_of, source_of
from ficco.kernels.gated import Gate, Matrices
from ficco.kernels.variants import Launch, Variant, variant_of
from ficco.plan.tables import GatedPart

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
    from ficco.core.private.triton_core import compile_for_amd

    kernel = _KERNELS[entry]
    source = getattr(importlib.import_module(f"ficco.kernels.{kernel.module}"), entry)
    with building.without_lines():
        options = {"num_warps": THREADS[entry] // WAVEFRONT}
        return compile_for_amd(source, kernel.signature, arch, WAVEFRONT, options)


# ---- the gated GEMM, in packs: their code objects are at the place of cubins

_DTYPES = ("bfloat16", "float16", "float32")
_EVEN, _ODD = 256, 255  # sizes of matrices; kernels depend on whether 16 divides them
_ADDRESS = 1 << 40
_UNITS, _TICKS = 304, 10**8  # kernels do not depend on them
_INSTRUCTION = 16  # rows and columns of a matrix instruction


def gated_launches() -> Iterator[Launch]:
    """Yield a launch of every kernel: of each dtype, layout of b, and with aligned rows or not."""
    for dtype in _DTYPES:
        for size, turned in ((_EVEN, 0), (_EVEN, 1), (_ODD, 0), (_ODD, 1), (_ODD, 2)):
            yield _launch(dtype, size, turned)


def _launch(dtype: str, size: int, turned: int) -> Launch:
    def matrix(down: int, along: int) -> Described:
        return Described(_ADDRESS, (size, size), (down, along), dtype)

    a = matrix(size, 1)
    b = matrix(*((size, 1), (1, size), (2 * size, 2))[turned])
    parts = [GatedPart("own", 0, 0, 1), GatedPart("window", 0, 1, 1, 0)]
    table = gated_amd.prepare(parts, size, size, dtype, DescribedArrays(0, _UNITS))
    words = Address(_ADDRESS)
    gate = Gate(words, words, words, 0, missed=words)
    return gated_amd.launch_of(table, Matrices(a, a, b, None, a), gate, _TICKS)


def compiled_gated(variant: Variant, arch: str) -> Any:
    """Return a kernel, compiled by Triton; see `code_object_of`."""
    from ficco.core.private.triton_core import compile_for_amd

    function, signature, constants, attributes = source_of(variant)
    options = options_of(variant) | {"matrix_instr_nonkdim": _INSTRUCTION}
    with building.without_lines():
        return compile_for_amd(
            function, signature, arch, WAVEFRONT, options, constants, attributes
        )  # fmt: skip


def _packed(arch: str) -> bytes:
    from ficco.core.private.triton_core import code_object_of, shared_bytes_of

    kernels: dict[str, Any] = {}
    blocks = building.Blocks("code")
    for launch in gated_launches():
        variant = variant_of(launch)
        made = compiled_gated(variant, arch)
        code = code_object_of(made)[0]
        kernels[variant.key] = {
            "variant": variant.text, "name": variant.kernel, "shared": shared_bytes_of(made),
            "threads": WAVEFRONT * variant.warps, "descriptors": [],
            "cubin": blocks.add(code), "sha256": hashlib.sha256(code).hexdigest(),
        }  # fmt: skip
    manifest = {
        "format": pack.FORMAT, "arch": arch, "triton": building.TRITON, "kernels": kernels
    }  # fmt: skip
    contents = {"manifest.json": json.dumps(manifest, sort_keys=True, indent=0).encode()}
    return building.zipped(contents | blocks.finished())


def write() -> None:
    """Write the code objects and the packs of all architectures into the package."""
    from ficco.core.private.triton_core import code_object_of

    for arch in ARCHITECTURES:
        for entry in _KERNELS:
            code = code_object_of(compiled(entry, arch))[0]
            _write(path_of(entry, arch), code, "\x7fELF")
        _write(gated_path(arch), _packed(arch), "PK")


def _write(path: Path, content: bytes, begins: str) -> None:
    files.write(path, content, begins)
    print(f"{path}: {path.stat().st_size} bytes")
