"""Code objects for AMD's devices, which the package has for each architecture. No Triton."""

from __future__ import annotations

from pathlib import Path

from ficco.errors import EngineError

__all__ = [
    "ARCHITECTURES", "AWAITED", "AWAIT_ENTRY", "AWAIT_SHARED_BYTES", "await_code", "path_of",
]  # fmt: skip

ARCHITECTURES = ("gfx942", "gfx950")  # MI300 and MI350
AWAITED = 32  # words of a launch of the kernel that waits
AWAIT_ENTRY = "ficco_await_words"
AWAIT_SHARED_BYTES = 128  # dynamic shared memory of a launch


def path_of(arch: str) -> Path:
    """Return the file with the code object of an architecture."""
    return Path(__file__).with_name("packs") / f"{AWAIT_ENTRY}_{arch}.hsaco"


def await_code(arch: str) -> bytes:
    """Return the code object of the kernel that waits for signals.

    Args:
        arch: such as "gfx942".

    Raises:
        EngineError: the package has none for this architecture.
    """
    if arch not in ARCHITECTURES:
        raise EngineError(
            f"ficco has no code for {arch}, by which its devices would wait for signals; it has "
            f"code for {' and '.join(ARCHITECTURES)}"
        )
    return path_of(arch).read_bytes()
