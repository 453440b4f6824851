"""The `ficco` command: parses, calls one command, turns errors into one line and an exit code.

Exit codes: 0 right; 1 a wrong result, a rejected plan or a failed run; 2 bad arguments; 130 and
143: ended by SIGINT and SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ficco import __version__
from ficco.cli import doctor, explain, plan, run, sweep
from ficco.cli.ending import ending
from ficco.errors import FiccoError, InputError

__all__ = ["main", "parser"]


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; `command` and `main` are set for the one that is named."""
    found = argparse.ArgumentParser(
        prog="ficco",
        description="Hides tensor-parallel communication behind the GEMMs that need it.",
    )
    found.add_argument("--version", action="version", version=f"ficco {__version__}")
    commands = found.add_subparsers(dest="command", metavar="COMMAND")
    for module in (run, plan, explain, sweep, doctor):
        module.add_to(commands)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = parser()
    args = given.parse_args(argv)
    if args.command is None:
        given.print_help(sys.stderr)
        return 2
    try:
        with ending():
            code: int = args.main(args)
            sys.stdout.flush()
        return code
    except InputError as error:
        print(f"ficco {args.command}: {error}", file=sys.stderr)
        return 2
    except FiccoError as error:
        print(f"ficco {args.command}: {error}", file=sys.stderr)
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
    except BrokenPipeError:
        # whoever read us has gone; keep Python from complaining when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"ficco {args.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
