"""Two compilations of a kernel: for sizes and addresses that 16 divides, and for all others.

Triton compiles a kernel anew for every pattern of arguments that are 1 or that 16 divides. Sizes
that people choose fit one pattern; odd ones would make a kernel for nearly every shape.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import triton

__all__ = ["aligned", "for_any_size"]

_ALIGN = 16


def for_any_size(kernel: Any) -> Any:
    """Return the kernel with nothing known of its arguments; Triton's interpreter has but one."""
    if not isinstance(kernel, triton.JITFunction):
        return kernel
    names = [param.name for param in kernel.params if not param.is_constexpr]
    return triton.jit(kernel.fn, do_not_specialize=names)


def aligned(arguments: Mapping[str, Any], unspecialized: Collection[str]) -> bool:
    """Return whether 16 divides every address, size and stride but those that are 1.

    Args:
        arguments: of a launch, by name; constants have capital letters.
        unspecialized: names that the compiler knows nothing of in any case.
    """
    return all(
        value.data_ptr() % _ALIGN == 0
        if isinstance(value, torch.Tensor)
        else value % _ALIGN == 0 or value == 1
        for name, value in arguments.items()
        if isinstance(value, (int, torch.Tensor)) and not (name.isupper() or name in unspecialized)
    )
