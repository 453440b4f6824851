"""`ficco plan`: print a plan, or check one from a file."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ficco.cli.arguments import USUAL, add_command, add_problem, request_from
from ficco.cli.plan_file import check_alone, parsed, text_of
from ficco.cli.progress_line import Working
from ficco.cli.report.plan_text import fitted, plan_text, program_json, program_text
from ficco.cli.report.tables import UNLIMITED, width_of
from ficco.cli.streams import reader_may_leave
from ficco.core.errors import InputError
from ficco.lowering.planning import Verification, prove, steps_of
from ficco.plan import Plan
from ficco.plan.plan_json import dumps
from ficco.program import Program
from ficco.program.passes import compile_plan
from ficco.program.passes.readback import read_back_plan
from ficco.program.target import HOST, LIBRARY, cuda_target, hip_target, own_signals

_TARGETS = {"host": HOST, "library": LIBRARY, "hip": hip_target()}


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = add_command(
        commands, "plan", "print a plan, or check one",
        "Print the plan of a problem and a schedule, or prove that a plan is right. Nothing runs. "
        "Exit 1 if a plan is wrong.",
        (
            ("print what rank 0 does, step by step",
             "ficco plan matmul_all_reduce --schedule gated_1d --rank 0"),
            ("write a plan to a file, edit it, and prove it",
             "ficco plan --json > plan.json; ficco plan --check plan.json"),
        ),
    )  # fmt: skip
    add_problem(parser, USUAL)
    check = parser.add_argument_group("proof")
    check.add_argument(
        "--check", metavar="FILE", nargs="?", const=False,
        help="Prove the plan in FILE (- for stdin), or without FILE the plan of the problem. "
        "Default: the plan is printed.",
    )  # fmt: skip
    program = parser.add_argument_group("program")
    program.add_argument(
        "--program", action="store_true",
        help="Print the program for --target: copies, signal writes, waits, kernels. With --check, "
        "prove it. Default: the plan, which is the same for all targets.",
    )  # fmt: skip
    program.add_argument(
        "--target", choices=("host", "cuda", "hip", "library"),
        help="With --program: the target that it runs on. `library` is PyTorch, which runs "
        "schedules with transport='collective'. `hip` is for AMD GPUs, on which ficco has never "
        "run. Default: library for those schedules, else cuda.",
    )  # fmt: skip
    program.add_argument(
        "--signals", choices=("write", "copy"),
        help="With --program: whether CUDA streams write signals to peers, or copy them. Default: "
        "write.",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument(
        "--rank", type=int, metavar="N", help="Print the plan of this rank alone. Default: all."
    )
    output.add_argument(
        "--json", action="store_true",
        help="Print JSON on stdout, and nothing else. Default: readable text.",
    )  # fmt: skip
    parser.set_defaults(main=lambda args: _main(args, parser))


def _main(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if (args.target or args.signals) and not args.program:
        raise InputError("--target and --signals are for --program; add it, or leave them out")
    if args.signals and args.target not in (None, "cuda"):
        raise InputError(f"--signals is for CUDA streams; leave it out with --target {args.target}")
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
        also = ("check", "json", "main", "command", "program", "target", "signals")
        check_alone(args, parser, "--check", also)
        return _check(args)
    request = request_from(args)
    if len(request.lowered) != 1:
        raise InputError("ficco plan prints one plan; give one --schedule")
    if args.rank is not None and not 0 <= args.rank < request.problem.world:
        raise InputError(f"--rank {args.rank}: ranks are 0 to {request.problem.world - 1}")
    with Working("ficco plan") as work:
        work.say("builds the plan")
        plan = request.lowered[0].plan
        programs = _programs(plan, args.target, args.signals) if args.program else []
        if args.check is not None:
            plan = read_back_plan(plan, programs) if programs else plan
            work.say(f"proves {steps_of(plan)} steps")
            result = prove(plan)
    if args.check is not None:
        return _tell(result, args.json)
    width = width_of(sys.stdout, UNLIMITED)
    if programs:
        as_text = (
            program_json(plan, programs)
            if args.json
            else program_text(plan, programs, args.rank, width)
        )
        print(as_text.rstrip("\n"))
    elif args.json:
        sys.stdout.write(dumps(plan))
    else:
        print(plan_text(plan, args.rank, width))
    return 0


def _programs(plan: Plan, target: str | None, signals: str | None) -> list[Program]:
    """Return all ranks' programs, for ranks on devices of their own."""
    collective = plan.schedule.transport == "collective"
    target = target or ("library" if collective and not signals else "cuda")
    if target in _TARGETS:
        return [compile_plan(entry, _TARGETS[target]) for entry in plan.ranks]
    return [
        compile_plan(entry, cuda_target(own_signals(entry.rank) if signals == "copy" else ()))
        for entry in plan.ranks
    ]


def _check(args: argparse.Namespace) -> int:
    """Prove the plan in a file, or the programs that passes compile from it."""
    text = text_of(args.check, "--check")
    with Working("ficco plan") as work:
        work.say("reads the plan")
        plan = parsed(text, args.check)
        if args.program:
            plan = read_back_plan(plan, _programs(plan, args.target, args.signals))
        work.say(f"proves {steps_of(plan)} steps")
        result = prove(plan)
    return _tell(result, args.json)


def _tell(result: Verification, as_json: bool) -> int:
    """Print the verdict on a plan; return the exit status."""
    if as_json:
        violation_rows = [violation._asdict() for violation in result.violations]
        text = json.dumps({"ok": result.ok, "violations": violation_rows})
    else:
        width = width_of(sys.stdout, UNLIMITED)
        text = "\n".join(fitted(line, width) for line in str(result).splitlines())
    with reader_may_leave():
        print(text)
    return 0 if result.ok else 1
