"""Code for AMD's devices, which the package has for each architecture, and the devices it is for.

No Triton.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ficco.core import files
from ficco.core.errors import EngineError
from ficco.kernels import pack
from ficco.kernels.variants import Variant

ARCHITECTURES = ("gfx942", "gfx950")  # MI300 and MI350
AWAIT_ENTRY, AWAITED = "ficco_await_words", 32  # words of a launch
HOLD_ENTRY, COMPARE_ENTRY = "ficco_hold", "ficco_compare_words"
THREADS = {AWAIT_ENTRY: 64, HOLD_ENTRY: 1024, COMPARE_ENTRY: 256}  # of a block
SHARED_BYTES = {AWAIT_ENTRY: 128, HOLD_ENTRY: 4, COMPARE_ENTRY: 16}  # dynamic, of a launch


def path_of(entry: str, arch: str) -> Path:
    """Return the file with the code object of a kernel for an architecture."""
    return Path(__file__).with_name("packs") / f"{entry}_{arch}.hsaco"


def code_of(entry: str, arch: str) -> bytes:
    """Return the code object of a kernel.

    Args:
        entry: one of those of `THREADS`.
        arch: such as "gfx942".

    Raises:
        EngineError: the package has none for this architecture.
    """
    _check(arch)
    return files.read(path_of(entry, arch))


def gated_path(arch: str) -> Path:
    """Return the file with the gated GEMMs of an architecture."""
    return pack.FOLDER / f"gated_{arch}.zip"


@functools.cache
def gated_pack(arch: str) -> pack.Pack:
    """Return the gated GEMMs of an architecture.

    Raises:
        EngineError: the package has none for it.
    """
    _check(arch)
    return pack.Pack(gated_path(arch))


def _check(arch: str) -> None:
    if arch not in ARCHITECTURES:
        raise EngineError(
            f"ficco has no code for {arch}, by which its devices would wait for signals; it has "
            f"code for {' and '.join(ARCHITECTURES)}"
        )


# ---- devices


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


def find(variant: Variant, device: int) -> pack.Found:
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
