"""Compiling Triton kernels for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend, GPUTarget


def compiled(
    kernel: Any, arguments: Mapping[str, Any], capability: int = 90, **options: int
) -> Any:
    """Return what Triton makes of a kernel for such arguments, specialized as when launched."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes = {}
    for number, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        kind, mark = "constexpr", None
        if not parameter.is_constexpr:
            special = not parameter.do_not_specialize
            kind, mark = native_specialize_impl(BaseBackend, value, False, special, True)
            kind = parameter.annotation_type or kind
        types[name] = kind
        if kind == "constexpr":
            constants[name] = value
        elif mark == "D":
            attributes[number,] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, types, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
