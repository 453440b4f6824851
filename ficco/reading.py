"""Reading parsed TOML: numbers and rows of them, with errors that say where and what was found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ficco.errors import InputError

__all__ = ["number", "rows", "table", "whole"]


def table(value: Any, known: Mapping[str, type], where: str) -> Mapping[str, Any]:
    """Return a table whose fields are all known and of their types; none need be there.

    Raises:
        InputError: it is none, or a field is unknown or of another type.
    """
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {value!r} found, a table is needed")
    for field, entry in value.items():
        if field not in known:
            raise InputError(f"{where}: unknown field {field!r}. Known: {', '.join(known)}")
        kind = known[field]
        if kind is float:
            number(entry, f"{where}: {field}")
        elif not isinstance(entry, kind) or (isinstance(entry, bool) and kind is not bool):
            raise InputError(f"{where}: {field}={entry!r}: a {kind.__name__} is expected")
    return value


def number(value: Any, where: str) -> float:
    """Return a finite number as a float.

    Raises:
        InputError: it is none.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            if math.isfinite(found := float(value)):
                return found
        except OverflowError:
            pass
    raise InputError(f"{where}={value!r}: a finite number is expected")


def whole(value: Any, where: str) -> int:
    """Return a number that is whole as an int.

    Raises:
        InputError: it is none.
    """
    if (found := number(value, where)).is_integer():
        return int(found)
    raise InputError(f"{where}={value!r}: a whole number is expected")


def rows(value: Any, columns: int, where: str) -> tuple[tuple[float, ...], ...]:
    """Return rows of so many numbers.

    Raises:
        InputError: it is no list of such lists; which row it is.
    """
    if not isinstance(value, list | tuple):
        raise InputError(f"{where}={value!r}: a list of rows of {columns} numbers is expected")
    found = []
    for at, row in enumerate(value):
        if not isinstance(row, list | tuple) or len(row) != columns:
            raise InputError(f"{where}[{at}]={row!r}: a row of {columns} numbers is expected")
        found.append(tuple(number(entry, f"{where}[{at}]") for entry in row))
    return tuple(found)
