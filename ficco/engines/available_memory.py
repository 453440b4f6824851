"""Room: whether memory that is asked for can be had, before anything is allocated.

On the host the kernel promises more memory than there is and ends a process when it is used, so
nothing else says so. On a GPU, PyTorch's allocator refuses by itself what does not fit; here a
whole problem is refused before its first part is allocated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ficco import _native

if TYPE_CHECKING:
    import torch

__all__ = ["LOOKED_AT", "check_gpu", "check_host", "check_on"]

LOOKED_AT = 64 << 20  # a single result of fewer bytes is not worth a look


def check_host(need: int, what: str) -> None:
    """Refuse what needs more bytes than the host has available.

    Available is the least of MemAvailable and what the process's control groups have left.

    Args:
        need: bytes.
        what: is to be held, for the message.

    Raises:
        MemoryError: there are fewer; the message has both sizes.
    """
    _check(need, _native.available_bytes(), what, "this machine")


def check_gpu(need: int, what: str, device: torch.device) -> None:
    """Refuse what needs more bytes than a GPU has free.

    What PyTorch holds of the GPU and does not use counts as free.

    Args:
        need: bytes.
        what: is to be held, for the message.
        device: a GPU.

    Raises:
        MemoryError: there are fewer; the message has both sizes.
    """
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    _check(need, free + unused, what, f"GPU {device.index}")


def check_on(device: torch.device, need: int, what: str) -> None:
    """Call `check_gpu` or `check_host`, as the device is; others have none."""
    if device.type == "cuda":
        check_gpu(need, what, device)
    elif device.type == "cpu":
        check_host(need, what)


def _check(need: int, free: int, what: str, where: str) -> None:
    if need > free:
        raise MemoryError(
            f"{what}: {_text(need)} asked for, {where} has {_text(free)} free; "
            "smaller sizes or fewer ranks need less"
        )


def _text(size: int) -> str:
    """Return a number of bytes, with a unit that fits."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} bytes"
