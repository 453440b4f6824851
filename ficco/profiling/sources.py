"""The source of a profile's figures, in one line: date, command and versions."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from ficco import __version__

__all__ = ["source_line"]


def source_line(versions: Mapping[str, str]) -> str:
    """Return a profile's `source`.

    Args:
        versions: versions of the packages that affect the figures, by name; ficco's is added.
    """
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    day = datetime.date.today().isoformat()
    return f"measured {day} by ficco doctor --profile: {named}, ficco {__version__}"
