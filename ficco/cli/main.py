"""The `ficco` command: parse, call one command, convert errors to one line and an exit code.

Exit codes: 0 success; 1 a wrong result, a rejected plan or a failed run; 2 bad arguments; 130 and
143: ended by SIGINT and SIGTERM.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from ficco import __version__
from ficco.cli import doctor, explain, listing, plan, run, streams, sweep
from ficco.cli.streams import ending
from ficco.core import logs
from ficco.core.errors import FiccoError, InputError, closest, escaped

_LAYOUT = "\n\t"  # characters of messages; others may come from files
_EXAMPLES = (
    "examples:",
    "  # run all schedules of all-gather + matmul on four emulated ranks",
    "  ficco run",
    "  # which schedule to take on eight H200s, and why",
    "  ficco explain matmul_reduce_scatter --machine h200x8",
)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; it sets `command` and `main` of the named command."""
    command_parser = Parser(
        prog="ficco",
        description="Overlaps tensor-parallel communication with the GEMMs that depend on it.",
        epilog="\n".join(_EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_parser.add_argument(
        "--version", action="version", version=f"ficco {__version__}",
        help="Print the version, and exit.",
    )  # fmt: skip
    commands = command_parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands",
        description="`ficco COMMAND --help` describes a command.",
    )  # fmt: skip
    for module in (run, plan, explain, sweep, doctor, listing):
        module.add_to(commands)
    return command_parser


def _check_values(args: argparse.Namespace) -> None:
    """Refuse `--ranks=--`, which argparse parses as an empty list; no option takes a list."""
    for name, value in vars(args).items():
        if isinstance(value, list):
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option}=--: '--' is not a value of {option}; give one")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    command_parser = parser()
    try:
        args = command_parser.parse_args(argv)
    except SystemExit:  # for example after --help
        failed = streams.finish_output()
        if failed is None or isinstance(failed, BrokenPipeError):
            raise
        print(f"ficco: {streams.error_text(failed)}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # of the help text, if Python does not buffer it
        streams.drop_output()
        return 0
    if args.command is None:
        command_parser.print_help(sys.stderr)
        return 2
    code = _run(args, sys.argv[1:] if argv is None else argv)
    streams.finish_output()  # after an error, output may be left that cannot be written
    return code


def _run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run the command that was parsed from `words`; return its exit code."""
    try:
        streams.make_ready()
        _check_values(args)
        logs.set_up()
        logs.log.info("%s begins", shlex.join(["ficco", *words]))
        with ending():
            code: int = args.main(args)
            with streams.reader_may_leave():
                sys.stdout.flush()
        logs.log.info("ficco %s ends with exit code %d", args.command, code)
        return code
    except InputError as error:
        print(f"ficco {args.command}: {escaped(str(error), keep=_LAYOUT)}", file=sys.stderr)
        return 2
    except FiccoError as error:
        print(f"ficco {args.command}: {escaped(str(error), keep=_LAYOUT)}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(
            f"ficco {args.command}: not enough memory for these sizes ({error}); "
            "choose smaller ones",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print(f"ficco {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has what it wanted, as `head` has
        streams.drop_output()
        return 0
    except OSError as error:
        failed = streams.finish_output() or error
        print(f"ficco {args.command}: {streams.error_text(failed)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())


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
