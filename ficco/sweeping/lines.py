"""Line numbers of values in a grid's file, for messages; Python's TOML parser has none."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["line_of"]

_MOST_BITS = 10_000  # Python converts no longer number to digits
_CASES = re.compile(r"\s*\[\[\s*cases\s*\]\]")


def line_of(text: str, case: int, value: Any) -> str:
    r"""Return the line number of a value of a case in a grid's file, as ", line 7".

    Args:
        text: the file's text; empty: there is none.
        case: index in the grid's [[cases]], from 0.
        value: the value. A number that is written in decimal digits is searched for; for any other
            value, the line is that of [[cases]].

    Returns:
        The line in words; empty if nothing is found.

    Example:
        >>> line_of("[[cases]]\nshapes = [[1, 2, 3_000_000_000]]", 0, 3_000_000_000)
        ', line 2'
    """
    rows = text.splitlines()
    starts = [number for number, row in enumerate(rows) if _CASES.match(row)]
    begin = starts[case] if case < len(starts) else 0
    end = starts[case + 1] if case + 1 < len(starts) else len(rows)
    shown_in_digits = isinstance(value, int) and value.bit_length() < _MOST_BITS
    if shown_in_digits and not isinstance(value, bool):
        pattern = re.compile(rf"(?<![\w.]){'_?'.join(str(value))}(?![\w.])")
        for number in range(begin, end):
            if pattern.search(rows[number].partition("#")[0]):
                return f", line {number + 1}"
    return f", line {begin + 1}" if case < len(starts) else ""
