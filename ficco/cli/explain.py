"""`ficco explain`: which schedule a problem should take on a machine, and why."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ficco.cli.arguments import HOST_RANKS, add_problem, problem_from
from ficco.cli.engine_choice import MOST_GPUS, driver_of, gpus, profile_of
from ficco.cli.progress_line import Working
from ficco.selector import METHODS, Book, Choice, choose
from ficco.timeline import REGIMES

__all__ = ["add_to"]

_SHOWN = 12  # alternatives in the table; JSON has all


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "explain", help="which schedule to take, and why",
        description="Say which schedule a problem should take on a machine, what the others are "
        "predicted to take, and why. Nothing runs.",
    )  # fmt: skip
    add_problem(parser, None)
    parser.add_argument(
        "--regime", choices=REGIMES, default="captured", help="how calls are made (%(default)s)"
    )
    parser.add_argument("--by", choices=METHODS, help="this method alone (book, else simulator)")
    parser.add_argument("--book", help="measured book, instead of the machine's shipped one")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, nothing else")
    parser.set_defaults(main=_main)


def _main(args: argparse.Namespace) -> int:
    engine, ranks = None, HOST_RANKS
    if args.machine is None:
        here = gpus(args.ranks or MOST_GPUS)
        if here.devices > 1:
            engine, ranks = "cuda", min(here.devices, MOST_GPUS)
    problem, machine = problem_from(args, engine, ranks)
    profile = profile_of(machine, problem.world)
    book = None if args.book is None else Book.named(args.book)
    driver = driver_of(machine)
    with Working("ficco explain") as work:
        found = choose(
            problem, profile, args.regime, book=book, by=args.by, driver=driver, told=work.say
        )
    p = problem
    if args.json:
        about = {"op": p.op, "m": p.m, "n": p.n, "k": p.k, "ranks": p.world, "dtype": p.dtype}
        about |= {"machine": profile.name, "regime": args.regime}
        print(json.dumps({**about, **found.to_json()}))
        return 0
    print(f"{p.op}  m={p.m} n={p.n} k={p.k}  {p.world} ranks  {p.dtype}  {args.regime}")
    print(f"machine {profile.name}: {profile.about}")
    print(f"figures: {profile.source or 'of the profile'}")
    print(_table(found))
    for reason in found.reasons:
        print(f"- {reason}")
    return 0


def _table(found: Choice) -> str:
    from rich.table import Table
    from rich.text import Text

    from ficco.report.tables import drawn

    table = Table(box=None, pad_edge=False)
    for name in ("", "schedule", "grain", "route", "order", "pace", "taper", "ms", "by"):
        table.add_column(name, justify="right" if name in ("grain", "ms") else "left")
    rows = [(found.schedule, found.predicted_ms), *found.alternatives[:_SHOWN]]
    for number, (schedule, ms) in enumerate(rows):
        axes = (
            schedule.name, str(schedule.chunks), schedule.route, schedule.order, schedule.pace,
            schedule.taper,
        )  # fmt: skip
        cells = ("" if number else "->", *axes, "" if ms is None else f"{ms:.3f}", found.by)
        table.add_row(*(Text(cell, "bold" if not number else "") for cell in cells))
    return drawn(table)
