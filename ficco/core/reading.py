"""Read and check TOML and JSON: text, numbers and rows of numbers; errors name the location.

Every invalid file raises InputError, including nesting that is too deep for Python's parsers and
numbers that they refuse to convert.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from ficco.core.errors import InputError, closest, shown

_MOST_TOML_STEPS = 5_000_000  # about two seconds
_BYTE_ORDER_MARK = "\ufeff"  # some editors write it at the beginning of a file
_IN_WORDS = {
    str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list",
    dict: "a table",
}  # fmt: skip


def parsed_toml(text: str, where: str, error: type[InputError] = InputError) -> dict[str, Any]:
    """Parse TOML text into a table.

    Args:
        text: the whole text.
        where: the file's kind and location, for the message.
        error: the class to raise.

    Raises:
        InputError: (as `error`) it is not TOML, or Python's parser cannot read it.
    """
    lines = text.split("\n")
    deepest = max(range(len(lines)), key=lambda at: lines[at].count("."))
    # Python's parser takes time in proportion to the product of a key's depth and all keys' depths.
    if lines[deepest].count(".") * (text.count(".") + len(lines)) > _MOST_TOML_STEPS:
        raise error(
            f"{where} is not read: line {deepest + 1} has {lines[deepest].count('.')} dots; break "
            "the line, or shorten its keys"
        )
    try:
        return tomllib.loads(text.removeprefix(_BYTE_ORDER_MARK))
    except RecursionError:
        raise error(f"{where} is not valid TOML: it is nested too deeply to be read") from None
    except ValueError as wrong:
        raise error(f"{where} is not valid TOML: {_reason(wrong, text)}") from None


def parsed_json(text: str | bytes, where: str, error: type[InputError] = InputError) -> Any:
    """Parse JSON text; arguments and errors are those of `parsed_toml`."""
    text = text if isinstance(text, bytes) else text.removeprefix(_BYTE_ORDER_MARK)
    if not text.strip():
        raise error(f"{where} is not JSON: it is empty")
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise error(f"{where} is not JSON: it is nested too deeply to be read") from None
    except ValueError as wrong:  # also of bytes that are not UTF-8
        raise error(f"{where} is not JSON: {_reason(wrong, text)}") from None


class _RepeatedError(ValueError):
    """A field that is twice in a table."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(fields := dict(pairs)) < len(pairs):
        counts = Counter(field for field, _ in pairs)
        raise _RepeatedError(
            f"the field {shown(max(counts, key=counts.__getitem__))} is there twice"
        )
    return fields


def _reason(wrong: ValueError, text: str | bytes) -> str:
    """Return a parser's reason; of a number that Python does not convert, the line instead."""
    if type(wrong) is not ValueError:  # the parsers raise subclasses, Python's int() does not
        return str(wrong)
    characters = text.decode(errors="replace") if isinstance(text, bytes) else text
    most = sys.get_int_max_str_digits()
    found = re.search(rf"\d(?:_?\d){{{most},}}", characters)
    line = characters.count("\n", 0, found.start()) + 1 if found else 1
    return f"a number at line {line} has more than {most} digits; write a shorter one"


def table(
    value: Any, known: Mapping[str, type], where: str, needed: Collection[str] = ()
) -> Mapping[str, Any]:
    """Return a table after checking that it has all needed fields, and all have their types.

    Raises:
        InputError: it is not a table, or a field is unknown, missing or of another type.
    """
    fields = check_known(value, known, where, needed)
    for field, entry in fields.items():
        kind = known[field]
        if kind is float:
            number(entry, f"{where}: {field}")
        elif not isinstance(entry, kind) or (isinstance(entry, bool) and kind is not bool):
            raise InputError(f"{where}: {field}={shown(entry)}: {_IN_WORDS[kind]} is expected")
        elif kind is str:
            printable(entry, f"{where}: {field}")
    return fields


def printable(value: Any, where: str) -> str:
    """Return a text of one line, without control characters.

    Raises:
        InputError: it is something else.
    """
    if not isinstance(value, str) or not value.isprintable():
        raise InputError(f"{where}={shown(value)}: a text without control characters is expected")
    return value


def check_known(
    value: Any, known: Collection[str], where: str, needed: Collection[str] = ()
) -> Mapping[str, Any]:
    """Return a table after checking that it has all needed fields, and no unknown field.

    Raises:
        InputError: it is not a table, a field is unknown or missing. The message names the field,
            and the known name closest to an unknown one.
    """
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {shown(value)} found, a table is needed")
    for field in value:
        if field not in known:
            raise InputError(
                f"{where}: unknown field {shown(field)}{closest(field, known)}. Known: "
                f"{', '.join(known)}"
            )
    for field in needed:
        if field not in value:
            raise InputError(f"{where}: the field {field!r} is missing")
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
    raise InputError(f"{where}={shown(value)}: a finite number is expected")


def whole(value: Any, where: str) -> int:
    """Return a whole number as an int.

    Raises:
        InputError: it is not a whole number.
    """
    if (as_float := number(value, where)).is_integer():
        return int(as_float)
    raise InputError(f"{where}={shown(value)}: a whole number is expected")


def rows(value: Any, columns: int, where: str) -> tuple[tuple[float, ...], ...]:
    """Return rows of `columns` numbers each.

    Raises:
        InputError: it is not a list of such rows; the message names the row.
    """
    if not isinstance(value, list | tuple):
        raise InputError(f"{where}={shown(value)}: a list of rows of {columns} numbers is expected")
    checked = []
    for at, row in enumerate(value):
        if not isinstance(row, list | tuple) or len(row) != columns:
            raise InputError(f"{where}[{at}]={shown(row)}: a row of {columns} numbers is expected")
        checked.append(
            tuple(number(entry, f"{where}[{at}][{column}]") for column, entry in enumerate(row))
        )
    return tuple(checked)
