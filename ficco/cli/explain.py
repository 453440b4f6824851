"""`ficco explain`: recommend a schedule for a problem on a machine, and say why."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ficco.cli.arguments import HOST_RANKS, add_command, add_problem, problem_from
from ficco.cli.engine_choice import MOST_GPUS, driver_of, gpus, profile_of
from ficco.cli.progress_line import Working
from ficco.core.errors import counted
from ficco.core.machine import Machine
from ficco.measure.selector import METHODS, Book, Choice, choose
from ficco.operators.problem import Problem
from ficco.plan.timeline import REGIMES

_SHOWN = 12  # alternatives in the table; the JSON lists all


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = add_command(
        commands, "explain", "recommend a schedule, and say why",
        "Say which schedule a problem should take on a machine and why, and the predicted times of "
        "the others. Nothing runs.",
        (
            ("a layer of Llama-3-70B on eight H200s",
             "ficco explain --machine h200x8 --m 8192 --n 57344 --k 8192"),
            ("what the simulator predicts for all-reduces of 16 rows",
             "ficco explain matmul_all_reduce --machine h100x2 --m 16 --by simulator"),
        ),
    )  # fmt: skip
    add_problem(parser, None)
    choice = parser.add_argument_group("choice")
    choice.add_argument(
        "--regime", choices=REGIMES, default="captured",
        help="The execution mode: in a CUDA graph, eager, or blocking. Default: "
        "%(default)s.",
    )  # fmt: skip
    choice.add_argument(
        "--by", choices=METHODS,
        help="Use only this method: the tuning table, the simulator, or the rule. "
        "Default: the tuning table, or the simulator if it lacks the shape.",
    )  # fmt: skip
    choice.add_argument(
        "--book", metavar="FILE",
        help="Use this tuning table. Default: the shipped one of the machine.",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true",
        help="Print JSON on stdout, and nothing else. Default: a table.",
    )  # fmt: skip
    parser.set_defaults(main=_main)


def _main(args: argparse.Namespace) -> int:
    with Working("ficco explain") as work:
        profile, problem, choice = _chosen(args, work)
    p = problem
    if args.json:
        about = {"op": p.op, "m": p.m, "n": p.n, "k": p.k, "ranks": p.world, "dtype": p.dtype}
        about |= {"machine": profile.name, "regime": args.regime}
        print(json.dumps({**about, **choice.to_json()}))
        return 0
    from ficco.cli.report.tables import UNLIMITED, width_of, wrapped

    width = width_of(sys.stdout, UNLIMITED)
    lines = [
        f"{p.op}  m={p.m} n={p.n} k={p.k}  {counted(p.world, 'rank')}  {p.dtype}  "
        f"regime {args.regime}",
        f"machine {profile.name}: {profile.about}",
        f"rates: {profile.source or 'those of the profile'}",
    ]
    print(wrapped("\n".join(lines), width, "  "))
    print(_table(choice, width_of(sys.stdout)))
    for reason in choice.reasons:
        print(wrapped(f"- {reason}", width, "  "))
    return 0


def _chosen(args: argparse.Namespace, work: Working) -> tuple[Machine, Problem, Choice]:
    """Return the machine's profile, the problem and the choice."""
    engine, ranks = None, HOST_RANKS
    if args.machine is None:
        work.say("looks for GPUs")
        here = gpus(args.ranks or MOST_GPUS)
        if here.devices > 1:
            engine, ranks = here.engine, min(here.devices, MOST_GPUS)
    problem, machine = problem_from(args, engine, ranks)
    profile = profile_of(machine, problem.world)
    book = None if args.book is None else Book.named(args.book)
    driver = driver_of(machine)
    choice = choose(
        problem, profile, args.regime, book=book, by=args.by, driver=driver, report=work.say
    )
    return profile, problem, choice


def _table(choice: Choice, width: int) -> str:
    """Return the choice and its alternatives, by predicted time."""
    from rich.text import Text

    from ficco.cli.report.tables import Column, table_text

    columns = (
        Column("", left=True),
        Column("schedule", left=True),
        Column("grain", "chunks per shard"),
        Column("route", "to all peers at once, or to one peer at a time (rotation)", True, 3),
        Column("order", "of chunks: by step or by peer", left=True, spare=4),
        Column("pace", "whether a push waits for the arrival of the one before (in_step)", True, 2),
        Column("taper", "which chunks are smaller than the others", left=True, spare=1),
        Column("ms", f"time of a call, by the {choice.by}; -> marks the recommended schedule"),
    )
    cells: list[list[str | Text]] = []
    rows = [(choice.schedule, choice.predicted_ms), *choice.alternatives[:_SHOWN]]
    for number, (schedule, ms) in enumerate(rows):
        axes = (
            schedule.name, str(schedule.chunks), schedule.route, schedule.order, schedule.pace,
            schedule.taper,
        )  # fmt: skip
        texts = ("" if number else "->", *axes, "" if ms is None else f"{ms:.3f}")
        cells.append([Text(text, "bold" if not number else "") for text in texts])
    return table_text(columns, cells, width)
