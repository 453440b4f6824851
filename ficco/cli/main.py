"""The `ficco` command: parses, calls one command, turns errors into one line and an exit code.

Exit codes: 0 right; 1 a wrong result, a rejected plan or a failed run; 2 bad arguments.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ficco import __version__, logs
from ficco.cli import doctor, explain, plan, run, streams, sweep
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
    try:
        args = given.parse_args(argv)
    except SystemExit:  # of --help, say
        streams.finish_output()
        raise
    if args.command is None:
        given.print_help(sys.stderr)
        return 2
    try:
        streams.make_ready()
        logs.set_up()
        asked = sys.argv[1:] if argv is None else argv
        logs.log.info("%s begins", shlex.join(["ficco", *asked]))
        with _ending():
            code: int = args.main(args)
            sys.stdout.flush()
        logs.log.info("ficco %s ends with exit code %d", args.command, code)
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
        streams.drop_output()
        return 1
    except OSError as error:
        print(f"ficco {args.command}: {error}", file=sys.stderr)
        return 1


@contextmanager
def _ending() -> Iterator[None]:
    """Let SIGTERM, as from `timeout`, end a command as an error does: with the ranks it started."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
