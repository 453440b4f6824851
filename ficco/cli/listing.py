"""`ficco list`: the machines, schedules, grids and operators that there are, a line each."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ficco import data, operators
from ficco.cli.arguments import add_command
from ficco.errors import InputError

__all__ = ["add_to"]

_KINDS = {
    "machines": "profiles of machines, for --machine",
    "schedules": "named schedules, for --schedule",
    "grids": "grids of shapes, for ficco sweep",
    "operators": "operators, for ficco run, plan and explain",
}
_FOLDERS = {"machines": "machines", "schedules": "named", "grids": "sweeps"}


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = add_command(
        commands, "list", "list machines, schedules, grids or operators",
        "List what there is by name, with one line of description each.",
        (
            ("the schedules that --schedule takes", "ficco list schedules"),
            ("the machines that --machine takes, as JSON", "ficco list machines --json"),
        ),
    )  # fmt: skip
    parser.add_argument(
        "kind", choices=tuple(_KINDS), metavar="KIND",
        help="What to list: "
        + "; ".join(f"{kind} ({about})" for kind, about in _KINDS.items()) + ".",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true",
        help="Print a JSON list of objects with the fields name and about. Default: a table.",
    )  # fmt: skip
    parser.set_defaults(main=_main)


def _main(args: argparse.Namespace) -> int:
    entries = _operators() if args.kind == "operators" else _in_files(args.kind)
    if args.json:
        print(json.dumps([{"name": name, "about": about} for name, about in entries.items()]))
        return 0
    from ficco.report.tables import UNLIMITED, width_of, wrapped

    longest, width = max(map(len, entries)), width_of(sys.stdout, UNLIMITED)
    for name, about in entries.items():
        print(wrapped(f"{name:<{longest}}  {about}".rstrip(), width, " " * (longest + 2)))
    return 0


def _in_files(kind: str) -> dict[str, str]:
    """Return the names of shipped files, with what each says of itself."""
    folder = _FOLDERS[kind]
    about = {
        name: data.load(folder, name, kind, InputError).get("about", "")
        for name in data.names(folder)
    }
    if kind == "schedules":
        for name, served in _served().items():
            about[name] += f" (only {' and '.join(served)})"
    return about


def _served() -> dict[str, list[str]]:
    """Return the operators of each schedule that not every operator has."""
    served: dict[str, list[str]] = {}
    for op in operators.names():
        for name in operators.get(op).schedules:
            served.setdefault(name, []).append(op)
    return served


def _operators() -> dict[str, str]:
    return {name: operators.get(name).about for name in operators.names()}
