"""Read and check TOML and JSON: text, numbers and rows of numbers; errors name the location.

Every invalid file raises InputError, including nesting that is too deep for Python's parsers and
numbers that they refuse to convert.
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
    """Parse TOML text into a table.

    Args:
        text: the whole text.
        where: the file's kind and location, for the message.
        error: the class to raise.

    Raises:
        InputError: (as `error`) it is not TOML, or Python's parser cannot read it.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise error(f"{where} is not valid TOML: it is nested too deeply to be read") from None
    except ValueError as wrong:  # also a number with thousands of digits
        raise error(f"{where} is not valid TOML: {wrong}") from None


def parsed_json(text: str | bytes, where: str, error: type[InputError] = InputError) -> Any:
    """Parse JSON text; arguments and errors are those of `parsed_toml`."""
    try:
        return json.loads(text)
    except RecursionError:
        raise error(f"{where} is not JSON: it is nested too deeply to be read") from None
    except ValueError as wrong:  # also a number with thousands of digits, or invalid bytes
        raise error(f"{where} is not JSON: {wrong}") from None


def table(value: Any, known: Mapping[str, type], where: str) -> Mapping[str, Any]:
    """Return a table after checking that its fields are known and have their types.

    Raises:
        InputError: it is not a table, or a field is unknown or of another type.
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
        InputError: it is not a finite number.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            if math.isfinite(as_float := float(value)):
                return as_float
        except OverflowError:
            pass
    raise InputError(f"{where}={value!r}: a finite number is expected")


def whole(value: Any, where: str) -> int:
    """Return a whole number as an int.

    Raises:
        InputError: it is not a whole number.
    """
    if (as_float := number(value, where)).is_integer():
        return int(as_float)
    raise InputError(f"{where}={value!r}: a whole number is expected")


def rows(value: Any, columns: int, where: str) -> tuple[tuple[float, ...], ...]:
    """Return rows of `columns` numbers each.

    Raises:
        InputError: it is not a list of such rows; the message names the row.
    """
    if not isinstance(value, list | tuple):
        raise InputError(f"{where}={value!r}: a list of rows of {columns} numbers is expected")
    checked = []
    for at, row in enumerate(value):
        if not isinstance(row, list | tuple) or len(row) != columns:
            raise InputError(f"{where}[{at}]={row!r}: a row of {columns} numbers is expected")
        checked.append(tuple(number(entry, f"{where}[{at}]") for entry in row))
    return tuple(checked)
