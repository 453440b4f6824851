"""`ficco sweep`: many schedules on many shapes, measured here or simulated, into a folder."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from ficco import data
from ficco.checking import positive_seconds
from ficco.cli import engine_choice
from ficco.cli.arguments import HOST_RANKS, fitting
from ficco.errors import EngineError, FiccoError, InputError, MachineError
from ficco.machine import Machine
from ficco.problem import MAX_WORLD
from ficco.selector import Book
from ficco.sweeping.grid import Grid
from ficco.sweeping.running import Asked, Outcome, run

__all__ = ["add_to"]

TIMEOUT_S = 30.0
NEAR = 0.03  # as near to the best as a choice is meant to come


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "sweep", help="measure or simulate many schedules on many shapes, into a folder",
        description="Measure a grid of operators, shapes and schedules on this machine, or "
        "simulate it, and write results, a book and a report. What was measured is never "
        "measured again: the same command goes on where it ended. Exit 1 where a result was wrong, "
        "a point failed, or nothing ran.",
    )  # fmt: skip
    parser.add_argument(
        "grid", nargs="?", metavar="GRID",
        help=f"grid: {', '.join(data.names('sweeps'))}, or a .toml file",
    )  # fmt: skip
    parser.add_argument("--out", metavar="DIR", help="folder for all that is found; a new one, or "
                        "that of this sweep to go on")  # fmt: skip
    parser.add_argument(
        "--report", metavar="DIR", help="write the report of a sweep's folder again, nothing else"
    )
    parser.add_argument("--no-report", action="store_true", help="leave the report out")
    parser.add_argument("--ranks", type=int, help=f"ranks ({HOST_RANKS}; on GPUs as many as these)")
    parser.add_argument(
        "--machine", help="profile to run as, instead of the grid's: a shipped name or a .toml file"
    )
    parser.add_argument(
        "--simulate", metavar="MACHINE", help="predict for a machine that has rates; nothing runs"
    )
    parser.add_argument(
        "--book", metavar="FILE", help="measured book by which the schedule auto is chosen"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, metavar="S",
        help="begin nothing after so long, and say what is left",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="S",
        help=f"seconds a wait may last ({TIMEOUT_S:g})",
    )  # fmt: skip
    parser.set_defaults(main=_main)


def _main(args: argparse.Namespace) -> int:
    if args.report is not None:
        return _report_again(args)
    if args.grid is None or args.out is None:
        raise InputError("a grid and --out DIR are needed: ficco sweep GRID --out DIR")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise InputError("sweep starts its own ranks: run it once, without torchrun")
    if not args.seconds > 0:
        raise InputError(f"--seconds {args.seconds}: it is a positive number of seconds")
    args.timeout = positive_seconds(args.timeout, "--timeout")
    asked = _asked(args, Grid.named(args.grid))
    outcome = run(asked)
    _say(args, asked, outcome)
    if not args.no_report:
        _report(asked.folder)
    if outcome.interrupted:
        return 130
    if not outcome.done:
        print(f"ficco sweep: nothing ran{outcome.why and ': ' + outcome.why}", file=sys.stderr)
    return 1 if not outcome.done or outcome.bad.keys() & {"wrong", "failed"} else 0


def _asked(args: argparse.Namespace, grid: Grid) -> Asked:
    """Turn the command line and a grid into what is asked for.

    Raises:
        InputError: the two, or machine and ranks, do not go together.
        EngineError: GPUs that are asked for cannot serve.
    """
    if args.simulate is not None and args.machine is not None:
        raise InputError(
            f"--machine {args.machine} with --simulate {args.simulate}: one machine is enough"
        )
    simulated = args.simulate is not None or (grid.how == "simulated" and args.machine is None)
    name = args.simulate or args.machine or grid.machine
    ranks = grid.ranks if args.ranks is None else args.ranks
    if args.ranks is not None and not 1 <= args.ranks <= MAX_WORLD:
        raise InputError(f"--ranks {args.ranks}: ficco runs 1 to {MAX_WORLD} ranks")
    profile: Machine | None
    profile_name: str | None
    if simulated:
        profile = machine = Machine.named(name)
        machine.check_rated()
        world, driver, profile_name = (
            ranks or min(machine.ranks, engine_choice.MOST_GPUS),
            None,
            name,
        )
    else:
        machine, world = _here(name, ranks, grid.name)
        name = name or machine.name
        profile, profile_name = _profile(machine, name, world)
        driver = (
            engine_choice.driver_of(Machine.named("cuda")) if machine.engine == "cuda" else None
        )
    if world > machine.ranks:
        raise InputError(f"{world} ranks: machine {machine.name!r} has {machine.ranks}")
    return Asked(
        grid, Path(args.out), machine, world, simulated, profile, profile_name, driver,
        None if args.book is None else Book.named(args.book), args.seconds, args.timeout,
    )  # fmt: skip


def _here(name: str, ranks: int, grid: str) -> tuple[Machine, int]:
    """Return the machine to run as, and ranks: on GPUs where they serve or are asked for."""
    machine = Machine.named(name) if name else None
    if machine is not None and machine.engine == "hip":
        raise InputError(
            f"machine {name!r}: ficco does not run on GPUs of AMD yet; --simulate {name} predicts"
        )
    if machine is not None and machine.engine == "host":
        return machine, ranks or min(machine.ranks, HOST_RANKS)
    found = engine_choice.gpus(ranks or engine_choice.MOST_GPUS)
    if found.devices < 2 or found.trouble:
        reason = found.trouble or "there is one GPU here, and two are needed"
        if machine is None:
            print(f"ficco sweep: on the host engine: {reason}", file=sys.stderr)
            return Machine.named(fitting(ranks or HOST_RANKS)), ranks or HOST_RANKS
        say = (
            f"grid {grid!r} runs as machine {name!r}, on GPUs: {reason}; `ficco doctor` tells more"
        )
        if found.devices:
            raise EngineError(say)
        raise InputError(f"{say}, --simulate h200x8 needs no GPU")
    world = ranks or min(found.devices, engine_choice.MOST_GPUS)
    if not 2 <= world <= found.devices:
        raise InputError(f"--ranks {world}: a sweep takes 2 to {found.devices} of the GPUs here")
    return machine or Machine.named("cuda"), world


def _profile(machine: Machine, name: str, world: int) -> tuple[Machine | None, str | None]:
    """Return the profile to predict from and its name, if there is one."""
    try:
        found = engine_choice.profile_of(machine, world)
    except MachineError as missing:
        print(f"ficco sweep: no predictions and no book: {missing}", file=sys.stderr)
        return None, None
    return found, name if found is machine else found.name


def _say(args: argparse.Namespace, asked: Asked, outcome: Outcome) -> None:
    """Tell what was found, what is missing and how to go on."""
    how = "simulated" if asked.simulated else "measured"
    print(f"{asked.folder}: {outcome.done} of {outcome.points} points {how}{_paced(asked)}")
    for kind, count in sorted(outcome.bad.items()):
        print(f'{count} {kind}: see "kind": "bad" in {asked.folder / "results.jsonl"}')
    if outcome.behind:
        near = sum(times <= 1 + NEAR for times in outcome.behind.values())
        worst = max(outcome.behind, key=outcome.behind.__getitem__)
        print(
            f"auto: within {NEAR:.0%} of the best on {near} of {len(outcome.behind)} shapes and "
            f"regimes; at worst {outcome.behind[worst] - 1:.1%} behind ({worst})"
        )
    if outcome.book:
        book = asked.folder / "book.toml"
        regimes = {point.regime for point in Book.named(str(book)).points}
        how = "" if "captured" in regimes else f" --regime {min(regimes)}"
        print(f"book: {book}; `ficco explain --book {book}{how}` chooses by it")
    elif outcome.no_book:
        print(outcome.no_book)
    if outcome.unended:
        why = "interrupted" if outcome.interrupted else "time is up"
        what = (
            f"{outcome.left} points are left"
            if outcome.left
            else f"timelines or DIL of {outcome.unended} shapes are left, all runs are there"
        )
        print(f"{why}: {what}; to go on: {_again(args)}", file=sys.stderr)


def _again(args: argparse.Namespace) -> str:
    """Return the command that goes on, as a shell takes it."""
    words = ["ficco", "sweep", args.grid, "--out", args.out]
    for name in ("ranks", "machine", "simulate", "book"):
        value = getattr(args, name)
        words += [] if value is None else [f"--{name}", str(value)]
    words += [] if args.timeout == TIMEOUT_S else ["--timeout", f"{args.timeout:g}"]
    return shlex.join(words)


def _paced(asked: Asked) -> str:
    return ", PACED" if not asked.simulated and asked.machine.paced else ""


def _report(folder: Path) -> None:
    """Write the report, or say in a line why there is none; results stay."""
    try:
        from ficco.report.sweep_page import write

        print(f"report: {write(folder)}")
    except (FiccoError, ImportError) as reason:
        print(f"ficco sweep: no report: {reason}", file=sys.stderr)


def _report_again(args: argparse.Namespace) -> int:
    given = [f"--{name}" for name in ("out", "ranks", "machine", "simulate", "book")
             if getattr(args, name) is not None]  # fmt: skip
    if args.grid is not None or given:
        raise InputError(f"--report {args.report} stands alone; leave {args.grid or given[0]} out")
    from ficco.report.sweep_page import write

    print(f"report: {write(Path(args.report))}")
    return 0
