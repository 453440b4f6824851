"""`ficco run`: run schedules, check every result, and compare their times with serial."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ficco.cli.arguments import HOST_RANKS, Request, add_command, add_problem, request_from
from ficco.cli.engine_choice import MOST_GPUS, chosen_engine
from ficco.cli.launch import end_with_launcher, launch
from ficco.cli.measure import Executor, NodeExecutor, PlanExecutor, Point, measure, requested
from ficco.cli.plan_file import plan_request
from ficco.cli.progress_line import Working
from ficco.cli.streams import reader_may_leave
from ficco.core import files, logs, settings
from ficco.core.checking import positive_seconds
from ficco.core.errors import EngineError, FiccoError, InputError, TimeoutExceeded
from ficco.plan.timeline import REGIMES, Timeline

MOST_ITERS = 1_000_000
_PICTURED = 100  # a part of a call that is less than 1/100 of it is not visible in its picture


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = add_command(
        commands, "run", "run schedules, check and time them",
        "Run an operator under schedules, check every result against float64, and print the times. "
        "Exit 1 if a result is wrong.",
        (
            ("all schedules of an operator, on four emulated ranks",
             "ficco run matmul_all_reduce --machine mesh4"),
            ("a plan that was edited by hand",
             "ficco run --plan plan.json --machine mesh4"),
        ),
    )  # fmt: skip
    add_problem(parser, "all")
    _add_engine(parser)
    timing = parser.add_argument_group("timing")
    timing.add_argument(
        "--iters", type=int, default=7, metavar="N",
        help="The number of timed runs of each schedule. Default: %(default)s.",
    )  # fmt: skip
    timing.add_argument(
        "--seed", type=int, default=0, metavar="N",
        help="The seed of the random inputs. Default: %(default)s.",
    )  # fmt: skip
    timing.add_argument(
        "--timeout", type=float, default=60.0, metavar="S",
        help="The longest wait within a call, in seconds. Default: %(default)g.",
    )  # fmt: skip
    prediction = parser.add_argument_group("prediction")
    prediction.add_argument(
        "--simulate", action="store_true",
        help="Predict the times from the rates of --machine, and prove the plans; nothing runs. "
        "Default: run.",
    )  # fmt: skip
    prediction.add_argument(
        "--regime", choices=REGIMES,
        help="With --simulate: the execution mode: in a CUDA graph, eager, or blocking. Default: "
        "captured.",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument(
        "--trace", metavar="FILE",
        help="Write the timeline of the fastest schedule to FILE, for Perfetto. Default: none.",
    )  # fmt: skip
    output.add_argument(
        "--json", action="store_true",
        help="Print one JSON document on stdout, and all else on stderr. Default: a table.",
    )  # fmt: skip
    parser.set_defaults(main=lambda args: _main(args, parser))


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what runs, and by which engine."""
    engine = parser.add_argument_group("engine and plan")
    engine.add_argument(
        "--engine", default="auto", choices=("auto", "host", "cuda", "hip"),
        help="host: threads and memory copies on this machine. cuda: a process per NVIDIA GPU. "
        "hip: a process per AMD GPU, on which ficco has never run. auto: GPUs if several reach "
        "each other and PyTorch supports them, else host; --machine overrides this. "
        "Default: auto.",
    )  # fmt: skip
    engine.add_argument(
        "--processes", action="store_true",
        help="Run a process per rank, over shared memory, as under torchrun and on GPUs. Default: "
        "all ranks in one process.",
    )  # fmt: skip
    engine.add_argument(
        "--compute", choices=("numpy", "torch"),
        help="The library for GEMMs on the host engine; GPUs use PyTorch. Default: numpy.",
    )  # fmt: skip
    engine.add_argument(
        "--plan", metavar="FILE",
        help="Run the plan in FILE (JSON, - for stdin) as it is, and compare it with serial. The "
        "plan is proved first. Its problem and schedule replace the options for these. Default: "
        "the plans of --schedule.",
    )  # fmt: skip
    engine.add_argument(
        "--no-verify", action="store_true",
        help="With --plan: check only the form of the plan, and do not prove it. Results are "
        "checked all the same. Default: it is proved.",
    )  # fmt: skip


def _main(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if args.no_verify and args.plan is None:
        raise InputError("--no-verify without --plan: it is for a plan in a file; leave it out")
    if args.simulate:
        return _simulated(args, parser, args.regime or "captured")
    if args.regime is not None:
        raise InputError(
            f"--regime {args.regime} without --simulate: a run synchronizes each call; leave it out"
        )
    if args.plan is not None:
        _check_timing(args)
        return _measured(args, plan_request(args, parser), is_rank=False)
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if under_torchrun and args.ranks is None:
        args.ranks = settings.whole("WORLD_SIZE")
    engine, gpus = chosen_engine(args)
    request = request_from(args, engine, min(gpus, MOST_GPUS) if gpus else HOST_RANKS)
    if gpus and args.compute is not None:
        raise InputError(
            f"--compute {args.compute}: it is for the host engine; leave it out, or add "
            "--engine host"
        )
    _check_timing(args)
    is_rank = under_torchrun or "FICCO_STORE" in os.environ
    if is_rank:
        end_with_launcher()
    names = ", ".join(schedule.name for schedule in request.schedules)
    logs.log.info("engine %s, machine %s, schedules %s", engine, request.machine.name, names)
    if (args.processes or gpus) and not is_rank:
        _check_trace(args.trace)
        return launch(request.problem.world)
    return _measured(args, request, is_rank)


def _check_timing(args: argparse.Namespace) -> None:
    """Check the options that say how to time, and fill in the library."""
    args.compute = args.compute or "numpy"
    if not 1 <= args.iters <= MOST_ITERS:
        raise InputError(f"--iters {args.iters}: it must be from 1 to {MOST_ITERS:,}")
    if args.seed < 0:
        raise InputError(f"--seed {args.seed}: it must be 0 or more")
    args.timeout = positive_seconds(args.timeout, "--timeout")


def _measured(args: argparse.Namespace, request: Request, is_rank: bool) -> int:
    """Run the request in this process, and print the results; return the exit status."""
    leads = not is_rank or os.environ.get("RANK") == "0"
    if leads:
        _check_trace(args.trace)
    try:
        with _executor(args, request, is_rank) as executor:
            points = measure(executor, request, args.iters, args.seed)
            best = _best(request, points)
            timeline = None if best.best is None else executor.joined(best.best)
            if executor.leads:
                with reader_may_leave():
                    _print(args, request, points, _how(args, request, is_rank))
                    _picture(args, best, timeline)
        if leads:
            _write_trace(args.trace, request, best, timeline)
    except TimeoutExceeded as error:
        text, advice, _ = str(error).partition("timeout_s is ")  # what follows is for functions
        if not advice:
            raise
        raise EngineError(
            f"{text}--timeout is {args.timeout:g} s: increase it if the machine is slow"
        ) from error
    return 0 if all(point.row.ok for point in points) else 1


def _simulated(args: argparse.Namespace, parser: argparse.ArgumentParser, regime: str) -> int:
    from ficco.cli.measure import check_alone, simulated

    check_alone(
        engine=args.engine != "auto", processes=args.processes, compute=args.compute is not None
    )
    if args.plan is None:
        request = request_from(args, regime=regime, simulated=True)
    else:
        request = plan_request(args, parser)
    _check_trace(args.trace)
    points = simulated(request, regime)
    best = _best(request, points)
    with reader_may_leave():
        _print(args, request, points, f"simulated, {regime}")
        _picture(args, best, best.best)
    _write_trace(args.trace, request, best, best.best)
    return 0 if all(point.row.ok for point in points) else 1


def _best(request: Request, points: list[Point]) -> Point:
    """Return the fastest of the requested points that have a timeline, if any has one."""
    asked = requested(request, points)
    pictured = [point for point in asked if point.best is not None]
    return min(pictured or asked, key=lambda point: point.row.overlap_ms)


def _write_trace(
    path: str | None, request: Request, best: Point, timeline: Timeline | None
) -> None:
    if path is None:
        return
    from ficco.cli.report.trace import BEGINS, chrome_trace

    empty = Timeline((), request.machine.engine, request.machine.name)
    text = chrome_trace(timeline or empty, f"{request.problem.op} {best.row.schedule}")
    try:
        files.write(Path(path), text, BEGINS)
    except OSError as error:
        raise FiccoError(f"--trace {path!r}: {error.strerror}; name another file") from None


@contextmanager
def _executor(args: argparse.Namespace, request: Request, is_rank: bool) -> Iterator[Executor]:
    """Yield the problem's executor: this process's rank of a group, or a node with all ranks."""
    if request.machine.engine != "host":
        with _opening(request.problem.world, is_rank):
            from ficco.measure.executors import GpuExecutor

            executor_of_gpu = GpuExecutor(request.problem.world, request.machine, args.timeout)
        with executor_of_gpu as gpu:
            if gpu.reason is not None and gpu.leads:
                raise EngineError(f"these GPUs cannot run ficco: {gpu.reason}")
            if gpu.reason is not None:
                raise SystemExit(1)  # the leading rank reports the reason
            yield gpu
        return
    if is_rank:
        with _opening(request.problem.world, is_rank):
            from ficco.measure.executors import RankExecutor

            executor = RankExecutor(
                request.problem.world, request.machine, args.compute, args.timeout
            )
        try:
            yield executor
        finally:
            executor.close()
        return
    from ficco.api.node import Node  # loads NumPy and the native core

    with Node(
        request.problem.world, machine=request.machine, compute=args.compute, timeout_s=args.timeout
    ) as node:
        yield PlanExecutor(node, request.lowered[0]) if request.by_hand else NodeExecutor(node)


@contextmanager
def _opening(world: int, is_rank: bool) -> Iterator[None]:
    """Show that a group opens, from rank 0: libraries are loaded, and ranks wait for each other."""
    with Working("ficco run", not is_rank or os.environ.get("RANK") == "0") as work:
        work.say(f"opens a group of {world} ranks")
        yield


def _check_trace(path: str | None) -> None:
    """Check that the trace can be written before anything runs."""
    if path is None:
        return
    from ficco.cli.report.trace import BEGINS

    try:
        files.check_writable(Path(path), BEGINS)
    except OSError as error:
        raise InputError(f"--trace {path!r}: {error.strerror}; name another file") from None


def _how(args: argparse.Namespace, request: Request, processes: bool) -> str:
    """Describe the compute library and the placement of ranks."""
    if request.machine.engine != "host":
        library = "cuBLAS" if request.machine.engine == "cuda" else "hipBLAS"
        return f"PyTorch's {library}, a process per GPU"
    return f"{args.compute}, {'a process per rank' if processes else 'all ranks in one process'}"


def _print(args: argparse.Namespace, request: Request, points: list[Point], how: str) -> None:
    from ficco.cli.report.tables import UNLIMITED, heading, results_table, width_of, wrapped

    p, link = request.problem, request.machine.link
    rated = request.machine.paced or args.simulate
    if args.json:
        document = {
            "op": p.op,
            "m": p.m,
            "n": p.n,
            "k": p.k,
            "ranks": p.world,
            "dtype": p.dtype,
            "engine": request.machine.engine,
            "machine": request.machine.name,
            "paced": request.machine.paced and not args.simulate,
            "simulated": args.simulate,
            "link_gbps": link.peak_gbps if link.paced and rated else None,
            "results": [asdict(point.row) for point in requested(request, points)],
        }
        print(json.dumps(document), flush=True)  # a full device is reported before the table
    stream = sys.stderr if args.json else sys.stdout
    width = width_of(stream, UNLIMITED)
    about = heading(p, request.machine, how, 0 if args.simulate else args.iters)
    print(wrapped(about, width, "  "), file=stream)
    print(results_table([asdict(point.row) for point in points], width_of(stream)), file=stream)
    alone = ("one rank: nothing is sent, so there is nothing to overlap",) if p.world == 1 else ()
    for line in (*alone, *request.chosen, *request.refused):
        print(wrapped(line, width, "  "), file=stream)


def _picture(args: argparse.Namespace, best: Point, timeline: Timeline | None) -> None:
    from ficco.cli.report.tables import width_of
    from ficco.cli.report.trace import text_timeline

    stream = sys.stderr if args.json else sys.stdout
    if timeline is None:
        print(f"\n{best.row.schedule} has no timeline: NCCL runs it, without a plan", file=stream)
        return
    label = "its fastest run" if timeline.engine == "host" else "a run that took times"
    call_us = 0.0
    if timeline.simulated:
        label, call_us = "simulated", 1e3 * best.row.overlap_ms
        if call_us - timeline.duration_us > call_us / _PICTURED:
            label += "; blank at the end: what starting and ending the call takes"
    print(f"\n{best.row.schedule}, {label}:", file=stream)
    print(text_timeline(timeline, width_of(stream), call_us), file=stream)
