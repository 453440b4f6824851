"""Compiling a variant by Triton, for a GPU that need not be present."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

from ficco.core.errors import EngineError
from ficco.kernels.declarations import Kernel
from ficco.kernels.variants import ALIGN, Launch, Variant, elements_of, kernel_of, passed

if TYPE_CHECKING:
    from ficco.core.private.triton_core import Facts

# Versions with a known layout of parameters. They pass all parameters except constants in the order
# of the signature, a descriptor as its map, shape (i32) and strides (i64), and then the addresses
# of global and profile scratch memory. Source: triton/backends/nvidia/driver.py of 3.5.1, 3.6.0,
# 3.7.0, 3.8.0 and 3.9.0.
KNOWN_TRITON = ("3.5", "3.6", "3.7", "3.8", "3.9")
# Element types of cuTensorMapEncodeTiled that differ from Triton's numbers.
_TENSOR_TYPES = {8: 10, 9: 8, 10: 9}


class Compiled(NamedTuple):
    """A compiled variant.

    Attributes:
        cubin: the binary that the driver loads.
        ptx: its PTX text.
        record: JSON types: name of the entry, shared bytes, threads of a block, descriptors.
        made: Triton's compiled kernel.
    """

    cubin: bytes
    ptx: str
    record: dict[str, Any]
    made: Any


def known(version: str) -> bool:
    """Return whether the parameter layout of a Triton version is known."""
    return ".".join(version.split(".")[:2]) in KNOWN_TRITON


def function_of(kernel: Kernel) -> Any:
    """Return a kernel's Triton function; imports Triton."""
    return getattr(importlib.import_module(kernel.module), kernel.name)


def compile_variant(variant: Variant, capability: int) -> Compiled:
    """Compile a variant for a compute capability (90: sm_90).

    Raises:
        EngineError: native code cannot launch the compiled kernel; the message says why.
    """
    from ficco.core.private import triton_core

    reason = triton_core.why_not_ahead()
    if reason:
        raise _by_triton(variant, f"cannot be compiled before its launch: {reason}")
    compiled = triton_core.compile_ahead(*source_of(variant), capability, options_of(variant))
    try:
        facts, (cubin, ptx) = triton_core.facts_of(compiled), triton_core.assemblies_of(compiled)
    except EngineError as error:
        raise _by_triton(variant, f"cannot be described: {error}") from error
    reason = why_unknown(facts)
    if reason:
        raise _by_triton(variant, reason)
    boxes = [
        {
            "block": list(meta["block_size"]),
            "type": _TENSOR_TYPES.get(meta["elem_type"], meta["elem_type"]),
            "swizzle": meta["swizzle"],
            "bytes": meta["elem_size"],
        }
        for meta in facts.tensordesc_meta or ()
    ]
    record = {
        "name": facts.name, "shared": facts.shared,
        "threads": 32 * facts.num_warps, "descriptors": boxes,
    }  # fmt: skip
    return Compiled(cubin, ptx, record, compiled)


def options_of(launch: Variant | Launch) -> dict[str, int]:
    """Return the compiler's options. Multiplications and additions are always fused (FMA)."""
    return {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True}


def _by_triton(variant: Variant, reason: str) -> EngineError:
    return EngineError(f"the kernel {variant.kernel} {reason}; it has to be launched by Triton")


def source_of(variant: Variant) -> tuple[Any, dict[str, Any], dict[str, Any], dict[Any, Any]]:
    """Return the function, signature, constants and attributes of a variant."""
    kernel = kernel_of(variant)
    kinds = [parameter for parameter in kernel.parameters if parameter.kind != "="]
    types = {p.name: _signature(kind) for p, kind in zip(kinds, variant.types, strict=True)}
    divided = {parameter.name for parameter in passed(variant) if parameter.divisor == ALIGN}
    signature = {p.name: types.get(p.name, "constexpr") for p in kernel.parameters}
    places: dict[str, tuple[int, ...]] = {}  # of parameters and of elements of tuples
    for i, (name, kind) in enumerate(signature.items()):
        places[name] = (i,)
        if type(kind) is tuple:
            places |= {f"{name}.{j}": (i, j) for j in range(len(kind))}
    attributes = {places[name]: [["tt.divisibility", ALIGN]] for name in places if name in divided}
    return function_of(kernel), signature, dict(variant.constants), attributes


def _signature(kind: str) -> Any:
    """Return a parameter's type as Triton takes it."""
    element, length = elements_of(kind)
    return (element,) * length if length else kind


def why_unknown(facts: Facts) -> str:
    """Return why native code cannot launch a compiled kernel, or ""."""
    version = str(facts.triton_version)
    scratch = facts.global_scratch_size or 0, facts.profile_scratch_size or 0
    described = facts.tensordesc_meta or ()
    reasons = {
        f"is compiled by Triton {version}; the layout of parameters is known only for "
        f"{', '.join(KNOWN_TRITON)}": not known(version),
        f"is for {facts.target.backend}, not cuda": facts.target.backend != "cuda",
        f"runs in clusters of {facts.num_ctas}": facts.num_ctas != 1,
        "is a cooperative launch": facts.launch_cooperative_grid,
        "depends on the launch before it": facts.launch_pdl,
        "needs scratch memory": scratch[0] > 0,
        "is instrumented": scratch[1] > 0,
        "holds elements of 4 bits": any(meta["fp4_padded"] for meta in described),
        "loads by im2col": any(meta.get("is_im2col") for meta in described),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
