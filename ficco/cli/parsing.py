"""The argument parser of the commands: its errors are one line each, like all errors of ficco."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from ficco.errors import closest

__all__ = ["Parser"]

_NEEDED = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """A parser without lines of usage before an error; parsers of its commands are like it."""

    def error(self, message: str) -> NoReturn:
        """Print one line on stderr, and exit with code 2."""
        self.exit(2, f"{self.prog}: {_in_words(message)}\n")


def _in_words(message: str) -> str:
    """Return an error of argparse in the form of ficco's errors."""
    found = re.fullmatch(r"argument (\S+): (.*)", message, re.DOTALL)
    if found is None:
        return message
    names, reason = found.groups()
    name = "command" if names == "COMMAND" else names.split("/")[0]
    if choice := re.match(r"invalid choice: '(.*?)'.* \(choose from (.*)\)$", reason, re.DOTALL):
        known = re.findall(r"[\w-]+", choice[2])
        near = closest(choice[1], known)
        return f"{name} {choice[1]!r} is unknown{near}. Known: {', '.join(known)}"
    if value := re.fullmatch(r"invalid (int|float) value: (.*)", reason, re.DOTALL):
        return f"{name} {value[2]}: {_NEEDED[value[1]]} is needed"
    return f"{name}: {reason}"
