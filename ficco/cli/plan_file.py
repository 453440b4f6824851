"""Plans in files, for commands: read one, refuse options that the plan decides, request a run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Container
from pathlib import Path

from ficco.cli.arguments import Request, fitting
from ficco.cli.progress_line import Working
from ficco.core import files
from ficco.core.errors import FiccoError, InputError, PlanError
from ficco.core.machine import Machine
from ficco.lowering.lowered import Lowered
from ficco.lowering.planning import check, steps_of
from ficco.operators import OPERATORS
from ficco.plan import Plan
from ficco.plan.plan_json import loads

# Options of `ficco run` that go with --plan. Others say what the plan says already.
_BESIDE_PLAN = (
    "plan", "no_verify", "machine", "engine", "processes", "compute", "iters", "seed", "timeout",
    "simulate", "regime", "trace", "json", "main", "command",
)  # fmt: skip


class RejectedPlan(FiccoError):
    """A plan that is wrong; unlike PlanError it is exit code 1."""


def check_alone(
    args: argparse.Namespace, parser: argparse.ArgumentParser, option: str, also: Container[str]
) -> None:
    """Refuse a problem or a schedule beside a plan's file, which contains both.

    Args:
        args: the command line.
        parser: the parser of the command.
        option: the option that names the file, such as "--check".
        also: options that go with it.

    Raises:
        InputError: another option was given, or an operator in place of a file.
    """
    source = getattr(args, option.removeprefix("--"))
    if source in OPERATORS and not os.path.exists(source):
        proved = option == "--check"
        aim, behind = ("prove its plan", f" {option}") if proved else ("run it", "")
        raise InputError(
            f"{option} {source}: the file of a plan is needed, but {source} is an operator, and no "
            f"file has this name; to {aim}, run `ficco {args.command} {source}{behind}`, with any "
            "other options"
        )
    for name, value in vars(args).items():
        if name not in also and value != parser.get_default(name):
            given = name if name == "op" else f"--{name.replace('_', '-')}"
            raise InputError(
                f"{given} {value} with {option}: the plan in {source} has its own; leave it out"
            )


def text_of(source: str, option: str) -> str:
    """Return the text of a plan's file; "-" is stdin.

    Raises:
        InputError: it cannot be read.
    """
    try:
        if source == "-":
            text = sys.stdin.read(files.PLAN_BYTES + 1)
            if len(text) > files.PLAN_BYTES:
                raise InputError(f"{option} -: stdin is larger than {files.PLAN_BYTES >> 20} MiB")
            return text
        return files.read_text(Path(source), files.PLAN_BYTES)
    except OSError as error:
        raise InputError(f"{option} {source}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{option} {source}: this is not a text file") from None


def parsed(text: str, source: str) -> Plan:
    """Return the plan in a text. Raises PlanError with the place of the error."""
    return loads(text, "stdin" if source == "-" else source)


def plan_request(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Request:
    """Return the request of `ficco run --plan`: the plan in a file, after its proof.

    Raises:
        InputError: another option contradicts the plan, or the file cannot be read.
        PlanError: the file is not a plan.
        RejectedPlan: the plan is wrong.
    """
    check_alone(args, parser, "--plan", _BESIDE_PLAN)
    if args.processes or args.engine == "cuda":
        given = "--processes" if args.processes else "--engine cuda"
        raise InputError(
            f"{given} with --plan: the host engine runs a plan from a file, with all ranks in one "
            "process; leave it out"
        )
    text = text_of(args.plan, "--plan")
    with Working("ficco run") as work:
        work.say("reads the plan")
        plan = parsed(text, args.plan)
        machine = Machine.named(args.machine or fitting(plan.problem.world))
        if machine.engine != "host" and not args.simulate:
            raise InputError(
                f"--machine {args.machine} with --plan: the host engine runs a plan from a file; "
                "name a machine such as mesh4 or host, or add --simulate"
            )
        if plan.problem.world > machine.ranks:
            raise InputError(
                f"the plan in {args.plan} has {plan.problem.world} ranks, machine "
                f"{machine.name!r} has {machine.ranks}; choose a larger machine"
            )
        work.say(f"proves {steps_of(plan)} steps")
        try:
            check(plan, whole=not args.no_verify)
        except PlanError as wrong:
            raise RejectedPlan(
                f"{args.plan}: {wrong}\nnothing ran; `ficco plan --check {args.plan}` lists all"
            ) from None
    lowered = Lowered(plan.problem, plan.schedule, plan)
    return Request(plan.problem, machine, (lowered,), by_hand=True)
