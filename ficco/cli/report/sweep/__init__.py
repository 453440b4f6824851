"""The report of a sweep: one HTML file, built only from the results in the same folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ficco.cli.report.sweep.reading import read
from ficco.core import files
from ficco.core.errors import EngineError, InputError

_EXTRA = ("jinja2", "matplotlib")  # the packages of the extra `report`
_BEGINS = r"(?s)<!DOCTYPE html>.{,600}<title>ficco sweep: "  # of every report


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

    Returns:
        The page's path.

    Raises:
        InputError: the folder is not a sweep's, or cannot be read or written.
        EngineError: the packages of the extra `report` are missing.
    """
    sweep = read(folder)
    try:
        from ficco.cli.report.sweep.page import page
    except ImportError as error:
        raise EngineError(_needed(str(error.name), folder)) from None
    text = page(sweep)
    page_path = folder / "report.html"
    try:
        files.write(page_path, text, _BEGINS)
    except OSError as error:
        raise InputError(f"{page_path} cannot be written: {error.strerror}") from None
    return page_path
