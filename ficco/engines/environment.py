"""What the process's environment says now; os.environ takes a microsecond for it."""

from __future__ import annotations

from ficco import _native

__all__ = ["is_set"]


def is_set(name: str) -> bool:
    """Whether a variable is set to anything but nothing and 0."""
    return _native.is_set(name)
