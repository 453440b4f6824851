"""Reading TOML and JSON: text, numbers and rows of them, with errors that say where and what.

Whatever a file holds, it is one InputError: nesting that Python's parsers cannot follow and numbers
that they will not convert, too.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from typing import Any

from ficco.errors import InputError

__all__ = ["number", "parsed_json", "parsed_toml", "rows", "table", "whole"]


def parsed_toml(text: str, where: str, error: type[InputError] = InputError) -> dict[str, Any]:
    """Return the table that TOML text holds.

    Args:
        text: the whole of it.
        where: what it is and where it was found, for the message.
        error: the class to raise.

    Raises:
        InputError: (as `error`) it is not TOML, or Python's parser cannot take it.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise error(f"{where} is not valid TOML: it is nested too deeply to be read") from None
    except ValueError as wrong:  # of a number with thousands of digits, too
        raise error(f"{where} is not valid TOML: {wrong}") from None


def parsed_json(text: str | bytes, where: str, error: type[InputError] = InputError) -> Any:
    """Return the value that JSON text holds; arguments and errors are those of `parsed_toml`."""
    try:
        return json.loads(text)
    except RecursionError:
        raise error(f"{where} is not JSON: it is nested too deeply to be read") from None
    except ValueError as wrong:  # of a number with thousands of digits, and of bytes, too
        raise error(f"{where} is not JSON: {wrong}") from None


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
