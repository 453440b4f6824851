"""Arguments that several commands share, and their conversion. Nothing here prints or runs."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ficco import operators
from ficco.cli.engine_choice import MOST_GPUS, driver_of, profile_of
from ficco.core import data
from ficco.core.dtypes import DTYPES, INDEX_DTYPES
from ficco.core.errors import InputError, ScheduleError
from ficco.core.machine import Machine
from ficco.lowering.lowered import Lowered
from ficco.lowering.sending import sends
from ficco.measure.selector.candidates import few_rows
from ficco.operators.problem import MODES, Problem
from ficco.operators.problem_checks import MAX_WORLD
from ficco.plan.schedule import MAX_CHUNKS, Schedule
from ficco.program.passes.served import check_served

# The default job. On mesh4 a chunk takes 5.8 ms, the transfer 23 ms and the GEMM 45 ms. Only a few
# of these ms are real work, so four ranks on two cores hardly wait for each other.
HOST_SIZES = {"m": 1024, "n": 256, "k": 1024}
HOST_RANKS, HOST_DTYPE = 4, "float32"
# On GPUs each transfer and each GEMM of this job takes some tenths of a millisecond.
GPU_SIZES = {"m": 8192, "n": 8192, "k": 8192}
GPU_DTYPE = "bfloat16"
_NARROWEST = 20  # columns of a description, where the terminal has fewer


@dataclass(frozen=True, slots=True)
class Request:
    """A problem, the machine to run it on, and resolved schedules.

    Attributes:
        lowered: the problem under each schedule.
        refused: why some schedules of `all` are left out.
        chosen: the schedule that `auto` selected, and why.
        by_hand: whether `lowered` is one plan from a file, whose schedule may be unresolved.
    """

    problem: Problem
    machine: Machine
    lowered: tuple[Lowered, ...]
    refused: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    by_hand: bool = False

    @property
    def schedules(self) -> list[Schedule]:
        """The schedules, in the order of `lowered`."""
        return [each.schedule for each in self.lowered]


def add_command(
    commands: Any, name: str, summary: str, description: str, examples: Sequence[tuple[str, str]]
) -> argparse.ArgumentParser:
    """Add a command whose help ends with examples: pairs of a comment and a command line."""
    columns = max(shutil.get_terminal_size().columns - 2, _NARROWEST)
    lines = [line for about, words in examples for line in (f"  # {about}", f"  {words}")]
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=textwrap.fill(description, columns),
        epilog="\n".join(["examples:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    return parser


USUAL = "hetero_fused_1d; two_waves or push_sm for experts"  # the default of --schedule


def add_problem(parser: argparse.ArgumentParser, schedule: str | None) -> None:
    """Add operator, sizes and machine to a command; add the schedule if it has a default."""
    problem = parser.add_argument_group("problem")
    problem.add_argument(
        "op", nargs="?", default="all_gather_matmul", metavar="OP",
        help=f"The operator: {', '.join(operators.names())}. `ficco list operators` describes "
        "them. Default: all_gather_matmul.",
    )  # fmt: skip
    for name, what in (
        ("m", "number of rows of x"), ("n", "number of columns of w"),
        ("k", "size of the contraction"),
    ):  # fmt: skip
        problem.add_argument(
            f"--{name}",
            f"--{name.upper()}",  # torchrun parses --m as one of its own options
            dest=name, type=int, metavar="N",
            help=f"The {what}, over all ranks. Default: {HOST_SIZES[name]}; on GPUs "
            f"{GPU_SIZES[name]}.",
        )  # fmt: skip
    problem.add_argument(
        "--ranks", type=int, metavar="N",
        help="The number of ranks. Default: that of --machine; without it "
        f"{HOST_RANKS}, or the number of GPUs.",
    )  # fmt: skip
    problem.add_argument(
        "--rows", metavar="N,N,...",
        help="The rows of each rank, separated by commas. Default: equal parts of m.",
    )  # fmt: skip
    problem.add_argument(
        "--splits", metavar="N,N;N,N",
        help="For all-to-all: the rows from each rank to each rank, with commas within a rank and "
        "semicolons between ranks. Default: equal parts of m.",
    )  # fmt: skip
    problem.add_argument(
        "--mode", metavar="MODE",
        help=f"For an embedding: how all tables are pooled: {', '.join(MODES)}. Default: sum.",
    )  # fmt: skip
    problem.add_argument(
        "--index-dtype", metavar="DTYPE",
        help=f"For an embedding: the dtype of indices and offsets: {', '.join(INDEX_DTYPES)}. "
        "Default: int64.",
    )  # fmt: skip
    problem.add_argument(
        "--dtype",
        help=f"The dtype of inputs and results: {', '.join(DTYPES)}. Default: {HOST_DTYPE}; on "
        f"GPUs {GPU_DTYPE}.",
    )  # fmt: skip
    where = parser.add_argument_group("machine" if schedule is None else "machine and schedule")
    where.add_argument(
        "--machine", metavar="NAME",
        help="The profile of the machine: a name from `ficco list machines`, or a .toml file. "
        "Default: the GPUs if several can be used, else the smallest mesh with enough ranks.",
    )  # fmt: skip
    if schedule is not None:
        where.add_argument(
            "--schedule", default=schedule, metavar="NAME", help=schedule_help(schedule)
        )
        where.add_argument(
            "--grain", type=_grain, metavar="N",
            help="The chunks per shard; `world`: the number of ranks. Default: the schedule's.",
        )  # fmt: skip


def _grain(text: str) -> int | str:
    """Return --grain: a number, or `world`."""
    if text == "world":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor world") from None


def schedule_help(default: str) -> str:
    """Return the help text of --schedule; the default "all" means that several are accepted."""
    several = " Several are separated by commas; `all` stands for all of the operator's."
    return (
        "The schedule: a name from `ficco list schedules`, a .toml file, or `auto` for the one "
        f"that is predicted to be fastest.{several if default == 'all' else ''} Default: {default}."
    )


def request_from(
    args: argparse.Namespace,
    engine: str | None = None,
    ranks: int = HOST_RANKS,
    regime: str = "synchronized",
    simulated: bool = False,
) -> Request:
    """Convert parsed arguments to a problem, a machine and schedules.

    Args:
        args: the command line; missing values are filled in.
        engine: the engine that runs the problem; None: nothing runs.
        ranks: number of ranks if the command line names none.
        regime: how calls will be made; `auto` chooses for it.
        simulated: predict for the machine's engine; nothing runs.

    Raises:
        InputError: an argument is invalid.
    """
    problem, machine = problem_from(args, engine, ranks)
    _check_grain(args.grain)
    lowered: dict[Schedule, Lowered] = {}
    refused: list[str] = []
    chosen: list[str] = []
    asked = problem.operator.usual_schedule if args.schedule == USUAL else args.schedule
    for name, one_of_all in _named(asked, problem, refused):
        if name == "auto":
            schedule, chosen_text = _automatic(args, problem, machine, regime)
            lowered.setdefault(schedule, Lowered(problem, schedule))
            chosen.append(chosen_text)
            continue
        schedule = _read(name, problem.op)
        # With `all`, shard-level schedules keep grain 1; a named schedule takes any grain.
        if args.grain is not None and not (one_of_all and schedule.grain == 1):
            schedule = replace(schedule, grain=args.grain)
        try:
            schedule = schedule.resolve(problem.world, machine)
            if one_of_all and machine.engine == "host" and sends(schedule, problem.flow):
                raise ScheduleError(
                    "it is a kernel of GPUs that sends rows; on the host, threads would do its work"
                )
            each = lowered.get(schedule) or Lowered(problem, schedule)
            if simulated:
                check_served(each, machine.engine, machine)
            else:
                check_served(each, engine)
        except ScheduleError as reason:
            if not one_of_all:
                if name.endswith(".toml"):
                    raise ScheduleError(f"{name}: {reason}") from reason
                raise
            refused.append(f"{name} left out: {reason}")
        else:
            lowered[schedule] = each
    return Request(problem, machine, tuple(lowered.values()), tuple(refused), tuple(chosen))


def _named(text: str, problem: Problem, refused: list[str]) -> list[tuple[str, bool]]:
    """Return the names in --schedule, and whether each stands for one of `all`.

    `refused` gets a line for each schedule of `all` that is left out.
    """
    names = []
    for given in text.split(","):
        if given != "all":
            names.append((given, False))
            continue
        most_rows = few_rows(problem.op)
        for name in Schedule.names(problem.op):
            if problem.m > most_rows and Schedule.named(name).for_few_rows:
                refused.append(
                    f"{name} left out: it is for {most_rows} rows or fewer, these are {problem.m}"
                )
            else:
                names.append((name, True))
    return names


def _read(name: str, op: str) -> Schedule:
    """Return a schedule of an operator by its name, or from a file.

    Raises:
        ScheduleError: there is none, or a file uses the name of another schedule.
    """
    schedule = Schedule.named(name, op)
    taken = schedule.name != name and schedule.name in data.names("named")
    if taken and schedule != Schedule.named(schedule.name):
        raise ScheduleError(
            f"--schedule {name}: its name is {schedule.name!r}, which is another schedule of "
            'ficco\'s; give it a name of its own in the file: name = "..."'
        )
    return schedule


def _check_grain(grain: int | str | None) -> None:
    if isinstance(grain, int) and not 1 <= grain <= MAX_CHUNKS:
        raise InputError(
            f"--grain {grain}: a whole number from 1 to {MAX_CHUNKS} is needed, or `world`"
        )


def problem_from(
    args: argparse.Namespace, engine: str | None = None, ranks: int = HOST_RANKS
) -> tuple[Problem, Machine]:
    """Convert parsed arguments to a problem and a machine; raises as `request_from`."""
    operators.get(args.op)  # raises for an unknown operator
    if args.ranks is None and args.machine is not None:
        count = Machine.named(args.machine).ranks
        args.ranks = count if count <= MOST_GPUS else ranks  # "host", "cuda": no fixed number
    if args.ranks is None:
        args.ranks = ranks
    if not 1 <= args.ranks <= MAX_WORLD:
        raise InputError(f"--ranks {args.ranks}: ficco runs 1 to {MAX_WORLD} ranks")
    own = engine if engine in ("cuda", "hip") else fitting(args.ranks)
    machine = Machine.named(args.machine or own)
    rows = None if args.rows is None else _numbers(args.rows, "--rows", args.ranks)
    given_m = args.m
    if rows is not None and args.m is None:
        args.m = sum(rows)
    _fill_in(args, machine.engine)
    if args.ranks > machine.ranks:
        raise InputError(
            f"--ranks {args.ranks}: machine {machine.name!r} has {machine.ranks}; request fewer, "
            "or choose a larger machine"
        )
    splits = None
    if args.splits is not None:
        known = [name for name in operators.names() if operators.get(name).flow.splits]
        if args.op not in known or rows is not None:
            raise InputError(f"--splits is for {' and '.join(known)}, instead of --rows")
        splits = _splits(args.splits, args.ranks)
        rows = tuple(sum(row) for row in splits)
        if given_m is not None and given_m != sum(rows):
            raise InputError(
                f"--m {given_m}, but --splits add up to {sum(rows)} rows; leave --m out"
            )
        args.m = sum(rows)
    problem = Problem.chunked(args.op, args.ranks, args.m, args.n, args.k, args.dtype, rows=rows)
    if splits is not None:
        problem = replace(problem, splits=splits)
    return _pooled(problem, args.mode, args.index_dtype), machine


def _pooled(problem: Problem, mode: str | None, index_dtype: str | None) -> Problem:
    """Return an embedding whose tables are pooled in a mode, by indices of a dtype."""
    for option, value in (("--mode", mode), ("--index-dtype", index_dtype)):
        if value is not None and not problem.flow.pools:
            raise InputError(f"{option} is for operators that pool bags, not for {problem.op}")
    if mode is not None and mode != "sum":
        modes = tuple((mode,) * len(tables) for tables in problem.tables)
        problem = replace(problem, modes=modes)
    return problem if index_dtype is None else replace(problem, index_dtype=index_dtype)


def _automatic(
    args: argparse.Namespace, problem: Problem, machine: Machine, regime: str
) -> tuple[Schedule, str]:
    """Return the selector's choice and its reasons."""
    from ficco.measure.selector import choose

    if args.grain is not None:
        raise InputError(
            f"--grain {args.grain} with --schedule auto: auto chooses the grain; leave --grain out"
        )
    profile, driver = profile_of(machine, problem.world), driver_of(machine)
    choice = choose(problem, profile, regime, driver=driver)
    name = f"{choice.schedule.name}, grain {choice.schedule.grain_text}"
    return choice.schedule, f"auto: {name}, by the {choice.by}: {'; '.join(choice.reasons)}"


def _fill_in(args: argparse.Namespace, engine: str) -> None:
    """Set missing sizes and a missing dtype to the engine's defaults."""
    for name, size in (HOST_SIZES if engine == "host" else GPU_SIZES).items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    if args.dtype is None:
        args.dtype = HOST_DTYPE if engine == "host" else GPU_DTYPE


def fitting(ranks: int) -> str:
    """Return the default profile of the host engine for a number of ranks."""
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
        raise InputError(f"{option} {text!r}: use whole numbers, separated by commas") from None
    if len(numbers) != count or any(number < 0 for number in numbers):
        raise InputError(
            f"{option} {text!r}: {count} numbers of 0 or more are needed, one per rank"
        )
    return numbers
