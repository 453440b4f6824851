"""`ficco list`: the operators, machines, schedules and grids that there are, a line each."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ficco import operators
from ficco.cli.arguments import add_command
from ficco.core import data
from ficco.core.errors import InputError

_KINDS = {
    "operators": "operators, for ficco run, plan and explain",
    "machines": "profiles of machines, for --machine",
    "schedules": "named schedules, for --schedule",
    "grids": "grids of shapes, for ficco sweep",
}
_FOLDERS = {"machines": "machines", "schedules": "named", "grids": "sweeps"}


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = add_command(
        commands, "list", "list operators, machines, schedules and grids",
        "List names, each with one line of description; without KIND, everything.",
        (
            ("the schedules that --schedule takes", "ficco list schedules"),
            ("the machines that --machine takes, as JSON", "ficco list machines --json"),
        ),
    )  # fmt: skip
    parser.add_argument(
        "kind", nargs="?", metavar="KIND",
        help="What to list: "
        + "; ".join(f"{kind} ({about})" for kind, about in _KINDS.items()) + ". Default: all.",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true",
        help="Print a JSON list of objects with the fields name and about; without KIND, an object "
        "with a list per kind. Default: a table.",
    )  # fmt: skip
    parser.set_defaults(main=_main)


def _main(args: argparse.Namespace) -> int:
    if args.kind is not None and args.kind not in _KINDS:
        raise InputError(
            f"{args.kind!r} cannot be listed; name one of {', '.join(_KINDS)}, or none for all"
        )
    kinds = _KINDS if args.kind is None else (args.kind,)
    found = {kind: _operators() if kind == "operators" else _in_files(kind) for kind in kinds}
    if args.json:
        rows = {
            kind: [{"name": name, "about": about} for name, about in entries.items()]
            for kind, entries in found.items()
        }
        print(json.dumps(rows if args.kind is None else rows[args.kind]))
        return 0
    if args.kind is None:
        print("\n\n".join(f"{_KINDS[kind]}:\n{_lines(found[kind], '  ')}" for kind in kinds))
    else:
        print(_lines(found[args.kind]))
    return 0


def _lines(entries: dict[str, str], indent: str = "") -> str:
    """Return the names, each with its description, in columns that fit the terminal."""
    from ficco.cli.report.tables import UNLIMITED, width_of, wrapped

    longest, width = max(map(len, entries)), width_of(sys.stdout, UNLIMITED)
    hanging = indent + " " * (longest + 2)
    return "\n".join(
        wrapped(f"{indent}{name:<{longest}}  {about}".rstrip(), width, hanging)
        for name, about in entries.items()
    )


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
