"""The report of a sweep: one HTML file, built only from the results in the same folder."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from ficco.errors import EngineError, InputError
from ficco.report.sweep.reading import read

__all__ = ["lacking", "write"]

_EXTRA = ("jinja2", "matplotlib")  # the packages of the extra `report`


def lacking(folder: Path) -> str:
    """Return why no report of a folder can be written, and what to do; empty if one can be."""
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    return _needed(" and ".join(missing), folder) if missing else ""


def _needed(missing: str, folder: Path) -> str:
    verb = "are" if " and " in missing else "is"
    return (
        f"the report needs {missing}, which {verb} not installed; `pip install 'ficco[report]'` "
        f"installs what is missing, then `ficco sweep --report {folder}` writes the page from the "
        "existing results"
    )


def write(folder: Path) -> Path:
    """Write report.html into a sweep's folder, from its sweep.json and results.jsonl.

    The write is atomic: a temporary file is renamed to report.html.

    Returns:
        The page's path.

    Raises:
        InputError: the folder is not a sweep's, or cannot be read or written.
        EngineError: the packages of the extra `report` are missing.
    """
    sweep = read(folder)
    try:
        from ficco.report.sweep.page import page
    except ImportError as error:
        raise EngineError(_needed(str(error.name), folder)) from None
    text = page(sweep)
    page_path, partial_path = folder / "report.html", folder / "report.html.part"
    try:
        partial_path.write_text(text, encoding="utf-8")
        os.replace(partial_path, page_path)
    except OSError as error:
        raise InputError(f"{page_path} cannot be written: {error.strerror}") from None
    return page_path
