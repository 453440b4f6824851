"""AMD's devices as kernels are loaded to them, and their code from the package."""

from __future__ import annotations

import functools
from typing import Any

from ficco.errors import EngineError
from ficco.kernels.amd_code import AWAIT_ENTRY, SHARED_BYTES, code_of, gated_pack
from ficco.kernels.pack import Found
from ficco.kernels.variants import Variant

__all__ = ["find", "gpu", "ticks_a_second"]


@functools.cache
def gpu(device: int) -> Any:
    """Return the native object of a device, by HIP's number.

    Raises:
        GpuError: there is no such device, or no HIP library.
        EngineError: the package has no code for its architecture.
    """
    from ficco import _native

    return _native.open_hip(device, code_of(AWAIT_ENTRY, _arch(device)), SHARED_BYTES[AWAIT_ENTRY])


@functools.cache
def ticks_a_second(device: int) -> int:
    """Return the rate of a device's constant clock."""
    from ficco import _native

    _, _, ticks = _native.DriverCalls(gpu(device)).extent
    return ticks


def find(variant: Variant, device: int) -> Found:
    """Return a kernel from the package.

    Raises:
        EngineError: the package lacks it; none is compiled on these devices.
    """
    arch = _arch(device)
    found = gated_pack(arch).find(variant)
    if found is None:
        raise EngineError(
            f"the package has no kernel {variant.kernel} for {arch} of {variant.text}; it has "
            "those of bfloat16, float16 and float32, in which all matrices have one dtype"
        )
    return found


@functools.cache
def _arch(device: int) -> str:
    from ficco import _native

    return str(_native.hip_capabilities(device)[1])
