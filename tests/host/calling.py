"""Calls of commands in this process."""

from __future__ import annotations

from typing import Any

from ficco.cli.main import main

__all__ = ["call"]


def call(capsys: Any, *args: str) -> tuple[int, str, str]:
    """Run a command; return its exit status, and what it wrote on stdout and stderr."""
    try:
        code = main(list(args))
    except SystemExit as stop:  # argparse
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err
