"""Arguments that several commands share, and what they stand for. No printing, no running."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from ficco import operators
from ficco.cli.engine_choice import MOST_GPUS, driver_of, profile_of
from ficco.engines.gating import check_served
from ficco.errors import InputError, ScheduleError
from ficco.machine import Machine
from ficco.problem import DTYPES, MAX_WORLD, Problem
from ficco.schedule import Schedule
from ficco.selector.candidates import few_rows

__all__ = ["Asked", "add_problem", "asked_from", "fitting", "problem_from"]

# The default job: on mesh4 its chunks last 5.8 ms, its transfer 23 ms and its GEMM 45 ms, of which
# real work is a few, so that four ranks on two cores hardly wait for each other.
HOST_SIZES = {"m": 1024, "n": 256, "k": 1024}
HOST_RANKS, HOST_DTYPE = 4, "float32"
# On GPUs transfers and GEMMs of this job last some tenths of a millisecond each.
GPU_SIZES = {"m": 8192, "n": 8192, "k": 8192}
GPU_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class Asked:
    """A problem, the machine to run it on, and resolved schedules.

    Attributes:
        refused: why others of `all` are left out.
        chosen: what `auto` stands for, and why.
    """

    problem: Problem
    machine: Machine
    schedules: tuple[Schedule, ...]
    refused: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()


def add_problem(parser: argparse.ArgumentParser, schedule: str | None) -> None:
    """Add operator, sizes and machine to a command, and the schedule where it has a default."""
    parser.add_argument(
        "op", nargs="?", default="all_gather_matmul", metavar="OP",
        help=f"operator: {', '.join(operators.names())} (default all_gather_matmul)",
    )  # fmt: skip
    for name, what in (("m", "rows of x"), ("n", "columns of w"), ("k", "the contraction")):
        parser.add_argument(
            f"--{name}",
            f"--{name.upper()}",  # torchrun takes --m for an option of its own
            dest=name,
            type=int,
            help=f"{what}, over all ranks ({HOST_SIZES[name]}; on GPUs {GPU_SIZES[name]})",
        )
    parser.add_argument(
        "--ranks", type=int, help="ranks (as many as the machine has that is named; else "
        f"{HOST_RANKS}, on GPUs as many as these)"
    )  # fmt: skip
    parser.add_argument("--rows", help="rows per rank, comma-separated, where they are uneven")
    parser.add_argument(
        "--splits",
        help="all-to-all: rows from each rank to each, commas within a rank, semicolons between",
    )
    parser.add_argument("--dtype", help=f"{', '.join(DTYPES)} ({HOST_DTYPE}; on GPUs {GPU_DTYPE})")
    parser.add_argument(
        "--machine", help="profile to run as: a shipped name or a .toml file (a mesh that fits)"
    )
    if schedule is not None:
        parser.add_argument("--schedule", default=schedule, help=schedule_help(schedule))
        parser.add_argument("--grain", type=int, help="chunks per shard, instead of the schedule's")


def schedule_help(default: str) -> str:
    """Return the help text of --schedule: of one that is taken, or of several ("all")."""
    several = ", several by comma, all" if default == "all" else ""
    names = dict.fromkeys(name for op in operators.names() for name in Schedule.names(op))
    return (
        f"name{several}, a .toml file, or auto (what is predicted to be fastest): "
        f"{', '.join(names)} ({default})"
    )


def asked_from(
    args: argparse.Namespace,
    engine: str | None = None,
    ranks: int = HOST_RANKS,
    regime: str = "synchronized",
    simulated: bool = False,
) -> Asked:
    """Turn parsed arguments into a problem, a machine and schedules.

    Args:
        args: the command line; what it leaves open is filled in.
        engine: what is to run it; None: nothing, and the machine says what for it is.
        ranks: how many, where the command line does not say.
        regime: how calls will be made, by which `auto` chooses.
        simulated: nothing runs; what the machine's engine could is predicted.

    Raises:
        InputError: any of them cannot be.
    """
    problem, machine = problem_from(args, engine, ranks)
    everything = args.schedule == "all"
    schedules, refused, chosen = [], [], []
    names = Schedule.names(problem.op) if everything else args.schedule.split(",")
    most = few_rows(problem.op)
    if everything and problem.m > most:
        few = [name for name in names if Schedule.named(name).transport == "sm"]
        names = [name for name in names if name not in few]
        refused = [
            f"{name} left out: it is for {most} rows or fewer, these are {problem.m}"
            for name in few
        ]
    for name in names:
        if name == "auto":
            schedule, said = _automatic(args, problem, machine, regime)
            schedules.append(schedule)
            chosen.append(said)
            continue
        schedule = Schedule.named(name)
        # `all` keeps shard level what it is; a schedule asked for by name takes any grain
        if args.grain is not None and not (everything and schedule.grain == 1):
            schedule = replace(schedule, grain=args.grain)
        schedule = schedule.resolve(problem.world, machine)
        try:
            check_served(problem, schedule, machine.engine if simulated else engine)
        except ScheduleError as reason:
            if not everything:
                raise
            refused.append(f"{name} left out: {reason}")
        else:
            schedules.append(schedule)
    return Asked(problem, machine, tuple(dict.fromkeys(schedules)), tuple(refused), tuple(chosen))


def problem_from(
    args: argparse.Namespace, engine: str | None = None, ranks: int = HOST_RANKS
) -> tuple[Problem, Machine]:
    """Turn parsed arguments into a problem and the machine to run it on; raises as `asked_from`."""
    operators.get(args.op)  # refuses an unknown one
    if args.ranks is None and args.machine is not None:
        named = Machine.named(args.machine).ranks
        args.ranks = named if named <= MOST_GPUS else ranks  # "host" and "cuda" have any number
    if args.ranks is None:
        args.ranks = ranks
    if not 1 <= args.ranks <= MAX_WORLD:
        raise InputError(f"--ranks {args.ranks}: ficco runs 1 to {MAX_WORLD} ranks")
    machine = Machine.named(args.machine or ("cuda" if engine == "cuda" else fitting(args.ranks)))
    rows = None if args.rows is None else _numbers(args.rows, "--rows", args.ranks)
    given = args.m
    if rows is not None and args.m is None:
        args.m = sum(rows)
    _fill_in(args, machine.engine)
    if args.ranks > machine.ranks:
        raise InputError(
            f"--ranks {args.ranks}: machine {machine.name!r} has {machine.ranks}; ask for fewer, "
            "or choose a larger one"
        )
    splits = None
    if args.splits is not None:
        known = [name for name in operators.names() if operators.get(name).flow.splits]
        if args.op not in known or rows is not None:
            raise InputError(f"--splits is for {' and '.join(known)}, instead of --rows")
        splits = _splits(args.splits, args.ranks)
        rows = tuple(sum(row) for row in splits)
        if given is not None and given != sum(rows):
            raise InputError(f"--m {given}, but --splits add up to {sum(rows)} rows; leave --m out")
        args.m = sum(rows)
    problem = Problem.chunked(args.op, args.ranks, args.m, args.n, args.k, args.dtype, rows=rows)
    if splits is not None:
        problem = replace(problem, splits=splits)
    return problem, machine


def _automatic(
    args: argparse.Namespace, problem: Problem, machine: Machine, regime: str
) -> tuple[Schedule, str]:
    """Return what the selector takes, and its reasons."""
    from ficco.selector import choose

    if args.grain is not None:
        raise InputError(f"--grain {args.grain} with --schedule auto, which chooses it")
    profile, driver = profile_of(machine, problem.world), driver_of(machine)
    found = choose(problem, profile, regime, driver=driver)
    name = f"{found.schedule.name}, grain {found.schedule.grain_text}"
    return found.schedule, f"auto: {name}, by the {found.by}: {'; '.join(found.reasons)}"


def _fill_in(args: argparse.Namespace, engine: str) -> None:
    """Set sizes and dtype that were left open to what suits the engine."""
    for name, size in (HOST_SIZES if engine == "host" else GPU_SIZES).items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    if args.dtype is None:
        args.dtype = HOST_DTYPE if engine == "host" else GPU_DTYPE


def fitting(ranks: int) -> str:
    """Return the profile that the host engine runs so many ranks as, where none is named."""
    return "mesh4" if ranks <= 4 else "mesh8" if ranks <= 8 else "host"


def _splits(text: str, ranks: int) -> tuple[tuple[int, ...], ...]:
    rows = text.split(";")
    if len(rows) != ranks:
        raise InputError(f"--splits {text!r}: {ranks} ranks, separated by semicolons, are needed")
    return tuple(_numbers(row, "--splits", ranks) for row in rows)


def _numbers(text: str, option: str, count: int) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{option} {text!r}: whole numbers, separated by commas") from None
    if len(numbers) != count or any(number < 0 for number in numbers):
        raise InputError(f"{option} {text!r}: {count} numbers of 0 or more are needed, one a rank")
    return numbers
