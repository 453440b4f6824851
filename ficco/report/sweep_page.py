"""The report of a sweep: one HTML file beside its results, made from them alone."""

from __future__ import annotations

import os
from pathlib import Path

from ficco.errors import EngineError, InputError
from ficco.report.sweep.reading import read

__all__ = ["write"]


def write(folder: Path) -> Path:
    """Write report.html into a sweep's folder, from its sweep.json and results.jsonl.

    A reader never sees half a page: the file is written beside its place and then moved there.

    Returns:
        The page's path.

    Raises:
        InputError: the folder is no sweep's, holds what cannot be read, or cannot be written to.
        EngineError: the packages of the extra `report` are missing.
    """
    sweep = read(folder)
    try:
        from ficco.report.sweep.page import page
    except ImportError as missing:
        raise EngineError(
            f"the report needs {missing.name}, which is not installed; "
            "`pip install 'ficco[report]'` brings it, then `ficco sweep --report "
            f"{folder}` makes the page from the results that are there"
        ) from None
    text = page(sweep)
    made, part = folder / "report.html", folder / "report.html.part"
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, made)
    except OSError as problem:
        raise InputError(f"{made} cannot be written: {problem.strerror}") from None
    return made
