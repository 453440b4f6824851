"""Reads of the process environment by native code, as os.environ takes a microsecond."""

from __future__ import annotations

from ficco import _native

__all__ = ["is_set"]


def is_set(name: str) -> bool:
    """Return whether a variable is set to anything other than the empty string or 0."""
    return _native.is_set(name)
