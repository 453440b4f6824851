"""Compiling a variant by Triton, for a GPU that need not be there."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from ficco.errors import EngineError
from ficco.kernels.declarations import KERNELS, Kernel
from ficco.kernels.variants import ALIGN, Variant, passed

__all__ = ["KNOWN_TRITON", "Compiled", "compile_variant", "function_of", "known", "made_by_triton",
           "why_unknown"]  # fmt: skip

# Versions whose layout of parameters is known: each passes what is no constant in the order of the
# signature, a descriptor as its map, its shape (i32) and its strides (i64), and at last the
# addresses of global and profile scratch memory. Read in triton/backends/nvidia/driver.py of 3.5.1,
# 3.6.0, 3.7.0 and 3.8.0.
KNOWN_TRITON = ("3.5", "3.6", "3.7", "3.8")
# Numbers of element types for cuTensorMapEncodeTiled, where Triton's own differ.
_TENSOR_TYPES = {8: 10, 9: 8, 10: 9}


class Compiled(NamedTuple):
    """A compiled variant.

    Attributes:
        cubin: what the driver loads.
        ptx: the text of which it is made.
        record: in JSON's types: name of the entry, shared bytes, threads of a block, descriptors.
        made: what Triton returned.
    """

    cubin: bytes
    ptx: str
    record: dict[str, Any]
    made: Any


def known(version: str) -> bool:
    """Return whether it is known how a version of Triton lays out a kernel's parameters."""
    return ".".join(version.split(".")[:2]) in KNOWN_TRITON


def function_of(kernel: Kernel) -> Any:
    """Return Triton's function of a kernel; it imports Triton."""
    return getattr(importlib.import_module(kernel.module), kernel.name)


def compile_variant(variant: Variant, capability: int) -> Compiled:
    """Compile a variant for a compute capability (90: sm_90).

    Raises:
        EngineError: native code cannot launch what Triton makes of it; says why.
    """
    made = made_by_triton(variant, capability)
    reason = why_unknown(made.metadata)
    if reason:
        raise EngineError(f"the kernel {variant.kernel} {reason}; it has to be launched by Triton")
    boxes = [
        {
            "block": list(each["block_size"]),
            "type": _TENSOR_TYPES.get(each["elem_type"], each["elem_type"]),
            "swizzle": each["swizzle"],
            "bytes": each["elem_size"],
        }
        for each in made.metadata.tensordesc_meta or ()
    ]
    record = {
        "name": made.metadata.name, "shared": made.metadata.shared,
        "threads": 32 * made.metadata.num_warps, "descriptors": boxes,
    }  # fmt: skip
    return Compiled(made.asm["cubin"], made.asm["ptx"], record, made)


def made_by_triton(variant: Variant, capability: int) -> Any:
    """Return what Triton compiles of a variant, or finds in its cache."""
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(_source(variant), target=target, options=options)


def _source(variant: Variant) -> Any:
    from triton.compiler import ASTSource

    kernel = KERNELS[variant.kernel]
    constants: dict[str, Any] = dict(variant.constants)
    types = {each.name: each.type for each in passed(variant)}
    divided = {each.name for each in passed(variant) if each.divisor == ALIGN}
    names = [each.name for each in kernel.parameters]
    signature = {name: types.get(name, "constexpr") for name in names}
    attributes = {
        (i,): [["tt.divisibility", ALIGN]] for i, name in enumerate(names) if name in divided
    }
    return ASTSource(function_of(kernel), signature, constants, attributes)


def why_unknown(metadata: Any) -> str:
    """Say why it is not known how to launch what Triton has compiled, or nothing."""
    version = str(metadata.triton_version)
    scratch = metadata.global_scratch_size or 0, metadata.profile_scratch_size or 0
    described = metadata.tensordesc_meta or ()
    found = {
        f"is compiled by Triton {version}; the layout of parameters is known of "
        f"{', '.join(KNOWN_TRITON)}": not known(version),
        f"is for {metadata.target.backend}, not cuda": metadata.target.backend != "cuda",
        f"runs in clusters of {metadata.num_ctas}": metadata.num_ctas != 1,
        "is a cooperative launch": metadata.launch_cooperative_grid,
        "depends on the launch before it": metadata.launch_pdl,
        "needs scratch memory": scratch[0] > 0,
        "is instrumented": scratch[1] > 0,
        "holds elements of 4 bits": any(each["fp4_padded"] for each in described),
        "loads by im2col": any(each.get("is_im2col") for each in described),
    }
    return next((reason for reason, so in found.items() if so), "")
