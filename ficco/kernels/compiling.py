"""Compiling a variant by Triton, for a GPU that need not be there."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

from ficco.errors import EngineError
from ficco.kernels.declarations import KERNELS, Kernel
from ficco.kernels.variants import ALIGN, Variant, passed

if TYPE_CHECKING:
    from ficco.private.triton_core import Facts

__all__ = ["KNOWN_TRITON", "Compiled", "compile_variant", "function_of", "known",
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
    from ficco.private import triton_core

    reason = triton_core.why_not_ahead()
    if reason:
        raise _by_triton(variant, f"cannot be compiled before its launch: {reason}")
    made = triton_core.compile_ahead(
        *_source(variant), capability, {"num_warps": variant.warps, "num_stages": variant.stages}
    )
    try:
        facts, (cubin, ptx) = triton_core.facts_of(made), triton_core.assemblies_of(made)
    except EngineError as error:
        raise _by_triton(variant, f"cannot be described: {error}") from error
    reason = why_unknown(facts)
    if reason:
        raise _by_triton(variant, reason)
    boxes = [
        {
            "block": list(each["block_size"]),
            "type": _TENSOR_TYPES.get(each["elem_type"], each["elem_type"]),
            "swizzle": each["swizzle"],
            "bytes": each["elem_size"],
        }
        for each in facts.tensordesc_meta or ()
    ]
    record = {
        "name": facts.name, "shared": facts.shared,
        "threads": 32 * facts.num_warps, "descriptors": boxes,
    }  # fmt: skip
    return Compiled(cubin, ptx, record, made)


def _by_triton(variant: Variant, reason: str) -> EngineError:
    return EngineError(f"the kernel {variant.kernel} {reason}; it has to be launched by Triton")


def _source(variant: Variant) -> tuple[Any, dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Return the function, signature, constants and attributes of a variant."""
    kernel = KERNELS[variant.kernel]
    types = {each.name: each.type for each in passed(variant)}
    divided = {each.name for each in passed(variant) if each.divisor == ALIGN}
    names = [each.name for each in kernel.parameters]
    signature = {name: types.get(name, "constexpr") for name in names}
    attributes = {
        (i,): [["tt.divisibility", ALIGN]] for i, name in enumerate(names) if name in divided
    }
    return function_of(kernel), signature, dict(variant.constants), attributes


def why_unknown(facts: Facts) -> str:
    """Say why it is not known how to launch what Triton has compiled, or nothing."""
    version = str(facts.triton_version)
    scratch = facts.global_scratch_size or 0, facts.profile_scratch_size or 0
    described = facts.tensordesc_meta or ()
    found = {
        f"is compiled by Triton {version}; the layout of parameters is known of "
        f"{', '.join(KNOWN_TRITON)}": not known(version),
        f"is for {facts.target.backend}, not cuda": facts.target.backend != "cuda",
        f"runs in clusters of {facts.num_ctas}": facts.num_ctas != 1,
        "is a cooperative launch": facts.launch_cooperative_grid,
        "depends on the launch before it": facts.launch_pdl,
        "needs scratch memory": scratch[0] > 0,
        "is instrumented": scratch[1] > 0,
        "holds elements of 4 bits": any(each["fp4_padded"] for each in described),
        "loads by im2col": any(each.get("is_im2col") for each in described),
    }
    return next((reason for reason, so in found.items() if so), "")
