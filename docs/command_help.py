"""A Sphinx directive that shows the help text of a command: ``{command-help} run``.

The text comes from the argument parser, so that it is never stale.
"""

from __future__ import annotations

from typing import Any

from command_texts import help_of
from docutils import nodes
from docutils.parsers.rst import Directive


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


def setup(app: Any) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
