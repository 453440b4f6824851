"""The result of a check of `ficco doctor`."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Finding"]


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        name: of the check.
        ok: whether what was looked for is there.
        found: what there is.
        serves: what it is used for.
        do: what to do if it is not there.
    """

    name: str
    ok: bool
    found: str
    serves: str
    do: str = ""
