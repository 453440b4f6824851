"""Compiling launches for a GPU that need not be there."""

from __future__ import annotations

import os
from typing import Any

from ficco.kernels import loading
from ficco.kernels.compiling import compile_variant
from ficco.kernels.native_launch import Code
from ficco.kernels.variants import Launch, Variant, variant_of

__all__ = ["compiled", "load_compiled", "on_gpu"]

# As the shipped kernels are compiled; lines take a twelfth of the time.
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"


def on_gpu(launch: Launch, **fields: Any) -> Launch:
    """Return a launch of arrays of the CPU as one of a GPU's, with these arguments changed."""
    return launch._replace(arguments=launch.arguments | {"ON_GPU": True} | fields)


def compiled(launch: Launch, capability: int = 90, **fields: Any) -> Any:
    """Return what Triton makes of a launch, as it is compiled for a GPU."""
    return compile_variant(variant_of(on_gpu(launch, **fields)), capability).made


def load_compiled() -> list[Variant]:
    """Compile kernels for sm_90 instead of loading them; return the list of these, as it grows."""
    variants: list[Variant] = []

    def code(launch: Launch) -> Code:
        variants.append(variant_of(launch))
        made = compile_variant(variants[-1], 90)
        return loading.code_of(variants[-1], made.record)._replace(function=1)

    loading.code = code
    return variants
