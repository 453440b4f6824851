"""Read environment variables, and check their values."""

from __future__ import annotations

import os
from pathlib import Path

from ficco.core.errors import InputError, shown

# Variables that decide which schedule a rank takes; they must be equal on all ranks.
EQUAL = ("FICCO_MACHINE", "FICCO_BOOK", "FICCO_MEASURE", "FICCO_PROBES", "FICCO_PACK")


def equal_variables() -> dict[str, str]:
    """Return the values of the variables in EQUAL that are set."""
    return {name: value for name in EQUAL if (value := os.environ.get(name, ""))}


def cache_folder() -> Path:
    """Return the folder for what is measured once per machine; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "ficco"


def switch(name: str, default: bool) -> bool:
    """Return whether a variable is on: "1", or off: "0".

    Args:
        name: of the variable.
        default: the result if the variable is unset or empty.

    Raises:
        InputError: the variable has another value.
    """
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise InputError(f"{name}={value!r}: set it to '1' or '0', or unset it")
    return value == "1" if value else default


def size_in_bytes(name: str) -> int | None:
    """Return a variable that is a number of bytes, or None if it is unset or empty.

    Raises:
        InputError: it is not such a number.
    """
    value = os.environ.get(name, "")
    if value and not (value.isdecimal() and len(value) <= 18):
        raise InputError(
            f"{name}={shown(value)}: set it to a number of bytes, 0 or more, or unset it"
        )
    return int(value) if value else None


def whole(name: str) -> int:
    """Return a variable that launchers such as torchrun set to a number of 0 or more.

    Raises:
        InputError: it is unset, or not such a number.
    """
    value = os.environ.get(name, "")
    if not value.isdecimal() or len(value) > 9:
        setting = f"{name}={shown(value)}" if value else f"{name} is unset"
        raise InputError(
            f"{setting}: a number of 0 or more is needed, which torchrun sets; start the ranks by "
            "torchrun, or unset TORCHELASTIC_RUN_ID and FICCO_STORE to run without it"
        )
    return int(value)
