"""Where a profile's figures come from, in one line: when, by what, with which versions."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from ficco import __version__

__all__ = ["source_line"]


def source_line(versions: Mapping[str, str]) -> str:
    """Return a profile's `source`.

    Args:
        versions: of what the figures depend on, by name; ficco's is added.
    """
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    day = datetime.date.today().isoformat()
    return f"measured {day} by ficco doctor --profile: {named}, ficco {__version__}"
