"""The help texts of ficco's commands, for pages and tests."""

from __future__ import annotations

import argparse
import os

from ficco.cli.main import parser

__all__ = ["commands_of", "help_of"]

_COLUMNS = 88


def help_of(command: str | None) -> str:
    """Return the help text of a command, or of `ficco` itself for None.

    Raises:
        KeyError: there is no such command.
    """
    os.environ["COLUMNS"] = str(_COLUMNS)  # argparse wraps its text at this width
    whole = parser()
    if command is None:
        return whole.format_help()
    return commands_of(whole)[command].format_help()


def commands_of(whole: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of all commands by name."""
    actions = [action for action in whole._actions if hasattr(action, "choices")]
    found = [action.choices for action in actions if isinstance(action.choices, dict)]
    return dict(found[0])
