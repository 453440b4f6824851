"""`ficco sweep`: measure or simulate many schedules on many shapes, and write a folder."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from ficco.cli import engine_choice
from ficco.cli.arguments import HOST_RANKS, add_command, fitting
from ficco.cli.progress_line import Working
from ficco.cli.report.sweep import lacking
from ficco.cli.report.tables import UNLIMITED, width_of, wrapped
from ficco.cli.sweeping.grid import Grid
from ficco.cli.sweeping.running import Outcome, SweepRequest, run
from ficco.core.checking import positive_seconds
from ficco.core.errors import EngineError, FiccoError, InputError, MachineError, counted
from ficco.core.machine import Machine
from ficco.measure.selector import Book
from ficco.operators.problem_checks import MAX_WORLD

TIMEOUT_S = 30.0
NEAR = 0.03  # a choice counts as good within this fraction of the best time


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = add_command(
        commands, "sweep", "measure or simulate many schedules on many shapes",
        "Measure a grid of operators, shapes and schedules on this machine, or simulate it, and "
        "write results, a tuning table and a report. A finished measurement is not repeated: the "
        "same command continues where it ended. Exit 1 if a result was wrong, a point failed, or "
        "nothing ran.",
        (
            ("small shapes on four emulated ranks", "ficco sweep laptop --out DIR"),
            ("the same shapes, predicted for eight H200s",
             "ficco sweep laptop --out DIR2 --simulate h200x8 --ranks 8"),
        ),
    )  # fmt: skip
    what = parser.add_argument_group("grid and folder")
    what.add_argument(
        "grid", nargs="?", metavar="GRID",
        help="The grid: a name from `ficco list grids`, or a .toml file.",
    )  # fmt: skip
    what.add_argument(
        "--out", metavar="DIR",
        help="The folder for all results: a new one, or that of this sweep to continue it. It has "
        "no default.",
    )  # fmt: skip
    where = parser.add_argument_group("machine")
    where.add_argument(
        "--machine", metavar="NAME",
        help="The profile to run as: a name from `ficco list machines`, or a .toml file. Default: "
        "the grid's; without it the GPUs, or an emulated mesh.",
    )  # fmt: skip
    where.add_argument(
        "--simulate", metavar="NAME",
        help="Predict for this machine, which needs rates; nothing runs. Default: run, unless the "
        "grid says otherwise.",
    )  # fmt: skip
    where.add_argument(
        "--ranks", type=int, metavar="N",
        help=f"The number of ranks. Default: the grid's; without it {HOST_RANKS}, or the number of "
        "GPUs.",
    )  # fmt: skip
    where.add_argument(
        "--book", metavar="FILE",
        help="The tuning table that the schedule `auto` uses. Default: the shipped one.",
    )  # fmt: skip
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--seconds", type=float, default=math.inf, metavar="S",
        help="Start nothing new after S seconds, and report what is left. Default: no limit.",
    )  # fmt: skip
    limits.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="S",
        help=f"The longest wait within a call, in seconds. Default: {TIMEOUT_S:g}.",
    )  # fmt: skip
    report = parser.add_argument_group("report")
    report.add_argument(
        "--no-report", action="store_true",
        help="Do not write the report. Default: DIR/report.html is written.",
    )  # fmt: skip
    report.add_argument(
        "--report", metavar="DIR",
        help="Only write the report of this folder again; takes no other option. Default: sweep.",
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
        raise InputError(f"--seconds {args.seconds}: it must be a positive number of seconds")
    args.timeout = positive_seconds(args.timeout, "--timeout")
    request = _request(args, Grid.named(args.grid))
    no_report = "" if args.no_report else lacking(request.folder)
    if no_report:
        print(f"ficco sweep: there will be no report: {no_report}", file=sys.stderr)
    outcome = run(request)
    _say(args, request, outcome)
    if not args.no_report and not no_report:
        _report(request.folder)
    if outcome.interrupted:
        return 130
    if not outcome.done:
        print(f"ficco sweep: nothing ran{outcome.why and ': ' + outcome.why}", file=sys.stderr)
    return 1 if not outcome.done or outcome.bad.keys() & {"wrong", "failed"} else 0


def _request(args: argparse.Namespace, grid: Grid) -> SweepRequest:
    """Convert the command line and a grid to a request.

    Raises:
        InputError: the two, or machine and ranks, contradict each other.
        EngineError: the requested GPUs are not usable.
    """
    if args.simulate is not None and args.machine is not None:
        raise InputError(
            f"--machine {args.machine} with --simulate {args.simulate}: leave one of the two out"
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
    return SweepRequest(
        grid, Path(args.out), machine, world, simulated, profile, profile_name, driver,
        None if args.book is None else Book.named(args.book), args.seconds, args.timeout,
    )  # fmt: skip


def _here(name: str, ranks: int, grid: str) -> tuple[Machine, int]:
    """Return the machine and the ranks to run: on GPUs if they are usable or requested."""
    machine = Machine.named(name) if name else None
    if machine is not None and machine.engine == "host":
        return machine, ranks or min(machine.ranks, HOST_RANKS)
    engine = "auto" if machine is None else machine.engine
    gpus = engine_choice.gpus(ranks or engine_choice.MOST_GPUS, engine)
    if gpus.devices < 2 or gpus.trouble:
        reason = gpus.trouble or "there is one GPU here, two are needed"
        if machine is None:
            print(f"ficco sweep: runs on the host engine: {reason}", file=sys.stderr)
            return Machine.named(fitting(ranks or HOST_RANKS)), ranks or HOST_RANKS
        message = (
            f"grid {grid!r} runs as machine {name!r}, on GPUs: {reason}; "
            "`ficco doctor` reports more"
        )
        if gpus.devices:
            raise EngineError(message)
        raise InputError(f"{message}, --simulate h200x8 needs no GPU")
    world = ranks or min(gpus.devices, engine_choice.MOST_GPUS)
    if not 2 <= world <= gpus.devices:
        raise InputError(f"--ranks {world}: a sweep takes 2 to {gpus.devices} of the GPUs here")
    return machine or Machine.named(gpus.engine), world


def _profile(machine: Machine, name: str, world: int) -> tuple[Machine | None, str | None]:
    """Return the profile to predict from and its name, or two Nones."""
    try:
        profile = engine_choice.profile_of(machine, world)
    except MachineError as error:
        print(f"ficco sweep: no predictions and no tuning table: {error}", file=sys.stderr)
        return None, None
    return profile, name if profile is machine else profile.name


def _say(args: argparse.Namespace, request: SweepRequest, outcome: Outcome) -> None:
    """Print the results, what is missing and how to continue."""
    verb = "simulated" if request.simulated else "measured"
    points = counted(outcome.points, "point")
    lines = [f"{request.folder}: {outcome.done} of {points} {verb}{_paced(request)}"]
    for kind, count in sorted(outcome.bad.items()):
        lines.append(f'{count} {kind}: see "kind": "bad" in {request.folder / "results.jsonl"}')
    if outcome.slowdowns:
        near = sum(times <= 1 + NEAR for times in outcome.slowdowns.values())
        worst = max(outcome.slowdowns, key=outcome.slowdowns.__getitem__)
        lines.append(
            f"auto: within {NEAR:.0%} of the best on {near} of {len(outcome.slowdowns)} shapes and "
            f"regimes; at worst {outcome.slowdowns[worst] - 1:.1%} slower ({worst})"
        )
    noisy = [name for name, spread in outcome.spreads.items() if spread > NEAR]
    if noisy:
        worst = max(noisy, key=outcome.spreads.__getitem__)
        lines.append(
            f"too noisy to judge {NEAR:.0%}: on {len(noisy)} of {len(outcome.spreads)} shapes and "
            f"regimes the runs of the fastest schedule vary by more (interquartile range; at worst "
            f"{outcome.spreads[worst]:.0%}, {worst}); sweep again on an idle machine, or with more "
            "rounds"
        )
    print(wrapped("\n".join(lines), width_of(sys.stdout, UNLIMITED), "  "))
    if outcome.book:
        book = request.folder / "book.toml"
        regimes = {point.regime for point in Book.named(str(book)).points}
        verb = "" if "captured" in regimes else f" --regime {min(regimes)}"
        print(f"tuning table: {book}; `ficco explain --book {book}{verb}` chooses by it")
    elif outcome.no_book:
        print(outcome.no_book)
    if outcome.unended:
        why = "interrupted" if outcome.interrupted else "time is up"
        if outcome.left:
            what = f"{counted(outcome.left, 'point')} {'is' if outcome.left == 1 else 'are'} left"
        else:
            shapes = counted(outcome.unended, "shape")
            what = f"timelines or DIL of {shapes} are left, all runs are done"
        print(f"{why}: {what}; to continue: {_again(args)}", file=sys.stderr)


def _again(args: argparse.Namespace) -> str:
    """Return the command that continues this sweep, quoted for a shell."""
    words = ["ficco", "sweep", args.grid, "--out", args.out]
    for name in ("ranks", "machine", "simulate", "book"):
        value = getattr(args, name)
        words += [] if value is None else [f"--{name}", str(value)]
    words += [] if args.timeout == TIMEOUT_S else ["--timeout", f"{args.timeout:g}"]
    return shlex.join(words)


def _paced(request: SweepRequest) -> str:
    return ", EMULATED" if not request.simulated and request.machine.paced else ""


def _report(folder: Path) -> None:
    """Write the report, or print one line that says why there is none."""
    try:
        with Working("ficco sweep") as work:
            work.say("writes the report")
            from ficco.cli.report.sweep import write

            page = write(folder)
        print(f"report: {page}")
    except (FiccoError, ImportError) as reason:
        print(f"ficco sweep: no report: {reason}", file=sys.stderr)


def _report_again(args: argparse.Namespace) -> int:
    options = [f"--{name}" for name in ("out", "ranks", "machine", "simulate", "book")
             if getattr(args, name) is not None]  # fmt: skip
    if args.grid is not None or options:
        raise InputError(
            f"--report {args.report} takes no other option; leave {args.grid or options[0]} out"
        )
    from ficco.cli.report.sweep import write

    print(f"report: {write(Path(args.report))}")
    return 0
