"""Compiles the gated GEMM for AMD's devices; no device is needed. See `packing.amd`.

A pack has the format of those of `building`: its code objects are at the place of cubins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ficco.kernels import gated_amd, pack
from ficco.kernels.amd_code import ARCHITECTURES, gated_path
from ficco.kernels.arrays import Address, Described, DescribedArrays
from ficco.kernels.compiling import options_of, source_of
from ficco.kernels.gated import Gate, GatedPart, Matrices
from ficco.kernels.variants import Launch, Variant, variant_of
from ficco.packing import building
from ficco.packing.amd import WAVEFRONT, without_lines

__all__ = ["compiled", "launches", "write"]

_DTYPES = ("bfloat16", "float16", "float32")
_EVEN, _ODD = 256, 255  # sizes of matrices; kernels depend on whether 16 divides them
_ADDRESS = 1 << 40
_UNITS, _TICKS = 304, 10**8  # kernels do not depend on them
_INSTRUCTION = 16  # rows and columns of a matrix instruction


def launches() -> Iterator[Launch]:
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


def compiled(variant: Variant, arch: str) -> Any:
    """Return a kernel, compiled by Triton; see `code_object_of`."""
    from ficco.private.triton_core import compile_for_amd

    function, signature, constants, attributes = source_of(variant)
    options = options_of(variant) | {"matrix_instr_nonkdim": _INSTRUCTION}
    with without_lines():
        return compile_for_amd(
            function, signature, arch, WAVEFRONT, options, constants, attributes
        )  # fmt: skip


def write() -> None:
    """Write the packs of all architectures into the package."""
    for arch in ARCHITECTURES:
        path = gated_path(arch)
        path.write_bytes(_packed(arch))
        print(f"{path}: {path.stat().st_size} bytes")


def _packed(arch: str) -> bytes:
    from ficco.private.triton_core import code_object_of, shared_bytes_of

    kernels: dict[str, Any] = {}
    blocks = building.Blocks()
    for launch in launches():
        variant = variant_of(launch)
        made = compiled(variant, arch)
        kernels[variant.key] = {
            "variant": variant.text, "name": variant.kernel, "shared": shared_bytes_of(made),
            "threads": WAVEFRONT * variant.warps, "descriptors": [],
            "cubin": blocks.add("code", code_object_of(made)[0]),
        }  # fmt: skip
    manifest = {
        "format": pack.FORMAT, "arch": arch, "triton": building.TRITON, "kernels": kernels
    }  # fmt: skip
    contents = {"manifest.json": json.dumps(manifest, sort_keys=True, indent=0).encode()}
    return building.zipped(contents | blocks.finished())
