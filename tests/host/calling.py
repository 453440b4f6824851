"""Calls of commands in this process."""

from __future__ import annotations

from typing import Any

from ficco.cli import progress_line
from ficco.cli.main import main

__all__ = ["call"]

progress_line.AFTER_S = 600.0  # on a busy host, lines of progress would be part of stderr


def call(capsys: Any, *args: str) -> tuple[int, str, str]:
    """Run a command; return its exit status, and what it wrote on stdout and stderr."""
    try:
        code = main(list(args))
    except SystemExit as stop:  # argparse
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err
