"""Code objects for AMD's devices, which the package has for each architecture. No Triton."""

from __future__ import annotations

import functools
from pathlib import Path

from ficco.errors import EngineError
from ficco.kernels import pack

__all__ = [
    "ARCHITECTURES",
    "AWAITED",
    "AWAIT_ENTRY",
    "COMPARE_ENTRY",
    "HOLD_ENTRY",
    "SHARED_BYTES",
    "THREADS",
    "code_of",
    "gated_pack",
    "gated_path",
    "path_of",
]

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
    return path_of(entry, arch).read_bytes()


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
