"""Where in a grid's file something stands, for messages: Python's TOML parser does not tell."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["line_of"]

_CASES = re.compile(r"\s*\[\[\s*cases\s*\]\]")


def line_of(text: str, case: int, value: Any) -> str:
    r"""Return ", line 7" for where a value of a case stands in a grid's file.

    Args:
        text: of the file; empty: there is none.
        case: which of the grid's [[cases]], from 0.
        value: a number is looked for; of anything else, or of a number that is written in another
            way, the line is that of [[cases]].

    Returns:
        The line in words; empty where nothing is found.

    Example:
        >>> line_of("[[cases]]\nshapes = [[1, 2, 3_000_000_000]]", 0, 3_000_000_000)
        ', line 2'
    """
    rows = text.splitlines()
    heads = [at for at, row in enumerate(rows) if _CASES.match(row)]
    begin = heads[case] if case < len(heads) else 0
    end = heads[case + 1] if case + 1 < len(heads) else len(rows)
    if isinstance(value, int) and not isinstance(value, bool):
        written = re.compile(rf"(?<![\w.]){'_?'.join(str(value))}(?![\w.])")
        for at in range(begin, end):
            if written.search(rows[at].partition("#")[0]):
                return f", line {at + 1}"
    return f", line {begin + 1}" if case < len(heads) else ""
