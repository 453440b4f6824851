"""A Sphinx directive that shows the help text of a command: ``{command-help} run``.

The text comes from the argument parser, so that it is never stale.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

from ficco.cli.main import parser

_COLUMNS = 88


class CommandHelp(Directive):
    """The output of `ficco COMMAND --help`; of `ficco --help` without an argument."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return a literal block."""
        command = self.arguments[0] if self.arguments else None
        try:
            text = help_of(command)
        except KeyError:
            raise self.error(f"ficco has no command {command!r}") from None
        block = nodes.literal_block(text, text)
        block["language"] = "text"
        return [block]


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


def setup(app: Any) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
