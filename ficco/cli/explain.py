"""`ficco explain`: recommend a schedule for a problem on a machine, and say why."""

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

_SHOWN = 12  # alternatives in the table; the JSON lists all


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "explain", help="recommend a schedule, and say why",
        description="Say which schedule a problem should take on a machine and why, and the "
        "predicted times of the others. Nothing runs.",
    )  # fmt: skip
    add_problem(parser, None)
    parser.add_argument(
        "--regime", choices=REGIMES, default="captured", help="how calls are made (%(default)s)"
    )
    parser.add_argument("--by", choices=METHODS, help="use only this method (book, else simulator)")
    parser.add_argument("--book", help="measured book; replaces the machine's shipped one")
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
        choice = choose(
            problem, profile, args.regime, book=book, by=args.by, driver=driver, report=work.say
        )
    p = problem
    if args.json:
        about = {"op": p.op, "m": p.m, "n": p.n, "k": p.k, "ranks": p.world, "dtype": p.dtype}
        about |= {"machine": profile.name, "regime": args.regime}
        print(json.dumps({**about, **choice.to_json()}))
        return 0
    print(f"{p.op}  m={p.m} n={p.n} k={p.k}  {p.world} ranks  {p.dtype}  {args.regime}")
    print(f"machine {profile.name}: {profile.about}")
    print(f"figures: {profile.source or 'of the profile'}")
    print(_table(choice))
    for reason in choice.reasons:
        print(f"- {reason}")
    return 0


def _table(choice: Choice) -> str:
    from rich.table import Table
    from rich.text import Text

    from ficco.report.tables import drawn

    table = Table(box=None, pad_edge=False)
    for name in ("", "schedule", "grain", "route", "order", "pace", "taper", "ms", "by"):
        table.add_column(name, justify="right" if name in ("grain", "ms") else "left")
    rows = [(choice.schedule, choice.predicted_ms), *choice.alternatives[:_SHOWN]]
    for number, (schedule, ms) in enumerate(rows):
        axes = (
            schedule.name, str(schedule.chunks), schedule.route, schedule.order, schedule.pace,
            schedule.taper,
        )  # fmt: skip
        cells = ("" if number else "->", *axes, "" if ms is None else f"{ms:.3f}", choice.by)
        table.add_row(*(Text(cell, "bold" if not number else "") for cell in cells))
    return drawn(table)
