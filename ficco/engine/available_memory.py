"""Checks that the memory of a problem is available before anything is allocated.

A host's kernel overcommits memory and kills a process that uses too much, so nothing else reports
the shortage. On a GPU, PyTorch's allocator raises by itself. The check here refuses the whole
problem before its first part is allocated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ficco import _native

if TYPE_CHECKING:
    import torch

LOOKED_AT = 64 << 20  # bytes; smaller results are not checked


def check_host(need: int, what: str) -> None:
    """Raise an error if the host has less memory available than needed.

    Available memory is the minimum of MemAvailable and the rest of the process's cgroup limits.

    Args:
        need: bytes needed.
        what: description of the data, for the message.

    Raises:
        MemoryError: too little memory is available; the message has both sizes.
    """
    _check(need, _native.available_bytes(), what, "this machine")


def check_gpu(need: int, what: str, device: torch.device) -> None:
    """Raise an error if a GPU has less free memory than needed.

    Memory that PyTorch has reserved on the GPU but does not use counts as free.

    Args:
        need: bytes needed.
        what: description of the data, for the message.
        device: a GPU.

    Raises:
        MemoryError: too little memory is free; the message has both sizes.
    """
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    _check(need, free + unused, what, f"GPU {device.index}")


def check_on(device: torch.device, need: int, what: str) -> None:
    """Call `check_gpu` or `check_host` by device type; other types are not checked."""
    if device.type == "cuda":
        check_gpu(need, what, device)
    elif device.type == "cpu":
        check_host(need, what)


def _check(need: int, free: int, what: str, where: str) -> None:
    if need > free:
        raise MemoryError(
            f"{what}: {_text(need)} requested, but {where} has {_text(free)} free; "
            "smaller sizes or fewer ranks need less"
        )


def _text(size: int) -> str:
    """Return a number of bytes as text with a suitable unit."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} bytes"
