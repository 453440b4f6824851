"""`ficco plan`: print a plan, or check one from a file."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ficco.cli.arguments import add_problem, request_from
from ficco.cli.progress_line import Working
from ficco.errors import InputError
from ficco.lowering import lower
from ficco.operators import OPERATORS
from ficco.passes import compile_plan
from ficco.passes.readback import read_back_plan
from ficco.plan import Plan
from ficco.plan_json import dumps, loads
from ficco.program import Program
from ficco.report.plan_text import plan_text
from ficco.report.program_text import program_json, program_text
from ficco.target import HOST, cuda_target, own_signals
from ficco.verifier import Violation, verify

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "plan", help="print a plan, or check one",
        description="Print the plan of a problem and schedule, or verify a plan's JSON.",
    )  # fmt: skip
    add_problem(parser, "hetero_fused_1d")
    parser.add_argument(
        "--check", metavar="FILE", nargs="?", const=False,
        help="verify the plan in FILE (- for stdin), or without FILE that of the problem",
    )  # fmt: skip
    parser.add_argument(
        "--program", action="store_true",
        help="print what runs on --target: each copy, signal write, wait and launch; with --check, "
        "prove it",
    )  # fmt: skip
    parser.add_argument("--target", choices=("host", "cuda"), help="of --program; default cuda")
    parser.add_argument(
        "--signals", choices=("write", "copy"),
        help="of --program: whether CUDA streams write signals to peers, or copy them; default "
        "write",
    )  # fmt: skip
    parser.add_argument("--rank", type=int, help="print only this rank's plan")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, nothing else")
    parser.set_defaults(main=lambda args: _main(args, parser))


def _main(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if (args.target or args.signals) and not args.program:
        raise InputError("--target and --signals are for --program; add it, or leave them out")
    if args.signals and args.target == "host":
        raise InputError("--signals is for CUDA streams; leave it out with --target host")
    if args.check is not None and args.rank is not None:
        raise InputError("--rank with --check: a proof is over all ranks; leave --rank out")
    if args.json and args.rank is not None:
        raise InputError("--rank is for the readable form; --json prints all ranks")
    if args.check == "":
        raise InputError(
            "--check '': the name of the file is empty; give the file of a plan, or --check alone "
            "to prove the plan of the problem"
        )
    if args.check:
        _check_alone(args, parser)
        return _check(args)
    request = request_from(args)
    if len(request.schedules) != 1:
        raise InputError("ficco plan prints one plan; give one --schedule")
    if args.rank is not None and not 0 <= args.rank < request.problem.world:
        raise InputError(f"--rank {args.rank}: ranks are 0 to {request.problem.world - 1}")
    with Working("ficco plan") as work:
        work.say("builds the plan")
        plan = lower(request.problem, request.schedules[0])
        programs = _programs(plan, args.target, args.signals) if args.program else []
        if args.check is not None:
            plan = read_back_plan(plan, programs) if programs else plan
            work.say(f"proves {_steps(plan)} steps")
            violations = verify(plan)
    if args.check is not None:
        return _tell(plan, violations, args.json)
    if programs:
        as_text = (
            program_json(plan, programs) if args.json else program_text(plan, programs, args.rank)
        )
        print(as_text.rstrip("\n"))
    elif args.json:
        sys.stdout.write(dumps(plan))
    else:
        print(plan_text(plan, args.rank))
    return 0


def _programs(plan: Plan, target: str | None, signals: str | None) -> list[Program]:
    """Return all ranks' programs, for ranks on devices of their own."""
    if target == "host":
        return [compile_plan(entry, HOST) for entry in plan.ranks]
    return [
        compile_plan(entry, cuda_target(own_signals(entry.rank) if signals == "copy" else ()))
        for entry in plan.ranks
    ]


def _check_alone(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse a problem or schedule with --check; the plan in the file contains both."""
    with_check = ("check", "json", "main", "command", "program", "target", "signals")
    for name, value in vars(args).items():
        if name not in with_check and value != parser.get_default(name):
            option = name if name == "op" else f"--{name}"
            raise InputError(
                f"{option} {value} with --check: the plan in {args.check} has its own; leave it out"
            )


def _check(args: argparse.Namespace) -> int:
    """Prove the plan in a file, or the programs that passes compile from it."""
    source = args.check
    try:
        if source == "-":
            text = sys.stdin.read()
        else:
            with open(source, encoding="utf-8") as file:
                text = file.read()
    except OSError as error:
        behind = "; OP comes before --check" if source in OPERATORS else ""
        raise InputError(f"--check {source}: {error.strerror}{behind}") from None
    except UnicodeDecodeError:
        raise InputError(f"--check {source}: this is not a text file") from None
    with Working("ficco plan") as work:
        work.say("reads the plan")
        plan = loads(text, "stdin" if source == "-" else source)
        if args.program:
            plan = read_back_plan(plan, _programs(plan, args.target, args.signals))
        work.say(f"proves {_steps(plan)} steps")
        violations = verify(plan)
    return _tell(plan, violations, args.json)


def _tell(plan: Plan, violations: list[Violation], as_json: bool) -> int:
    """Print the verdict on a plan; return the exit status."""
    if as_json:
        violation_rows = [violation._asdict() for violation in violations]
        print(json.dumps({"ok": not violations, "violations": violation_rows}))
    elif violations:
        for violation in violations:
            print(violation)
    else:
        print(_right(plan))
    return 1 if violations else 0


def _right(plan: Plan) -> str:
    return f"right: {plan.problem.op}, {plan.problem.world} ranks, {_steps(plan)} steps"


def _steps(plan: Plan) -> int:
    return sum(len(entry.steps) for entry in plan.ranks)
