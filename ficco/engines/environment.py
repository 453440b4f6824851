"""Reads of the process environment by native code, as os.environ takes a microsecond."""

from __future__ import annotations

from ficco import _native

__all__ = ["is_set"]

is_set = _native.is_set  # (name): whether it is set to anything other than the empty string or 0
