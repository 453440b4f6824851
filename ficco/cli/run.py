"""`ficco run`: execute schedules, check every result, time them against serial."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import IO, Any

from ficco.cli.arguments import Asked, add_problem, asked_from
from ficco.cli.launch import launch
from ficco.cli.measure import Executor, NodeExecutor, Point, measure
from ficco.errors import InputError

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "run", help="run schedules, check and time them",
        description="Run an operator under schedules; check every result against float64; time it.",
    )  # fmt: skip
    add_problem(parser, "all")
    parser.add_argument(
        "--engine", default="auto", choices=("auto", "host"),
        help="host: threads and memory copies of this machine; auto: the best there is (host)",
    )  # fmt: skip
    parser.add_argument(
        "--processes", action="store_true",
        help="a process per rank, over shared memory (under torchrun this is so anyway)",
    )  # fmt: skip
    parser.add_argument("--compute", default="numpy", choices=("numpy", "torch"), help="GEMMs by")
    parser.add_argument("--iters", type=int, default=7, help="timed runs (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (%(default)s)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a wait may last")
    parser.add_argument("--trace", metavar="FILE", help="write the best run for Perfetto")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, nothing else")
    parser.set_defaults(main=_main)


def _main(args: argparse.Namespace) -> int:
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if under_torchrun and args.ranks is None:
        args.ranks = int(os.environ["WORLD_SIZE"])
    asked = asked_from(args)
    if args.iters < 1:
        raise InputError(f"--iters {args.iters}: it is 1 or more")
    if args.seed < 0:
        raise InputError(f"--seed {args.seed}: it is 0 or more")
    if not (math.isfinite(args.timeout) and args.timeout > 0):
        raise InputError(f"--timeout {args.timeout}: it is a positive number of seconds")
    is_rank = under_torchrun or "FICCO_STORE" in os.environ
    trace = None if is_rank and os.environ.get("RANK") != "0" else _opened(args.trace)
    if args.processes and not is_rank:
        if trace is not None:
            trace.close()
        return launch(asked.problem.world)
    try:
        with _executor(args, asked, is_rank) as executor:
            points = measure(executor, asked, args.iters, args.seed)
            best = min(points, key=lambda point: point.row.overlap_ms)
            if best.best is not None:
                best.best = executor.joined(best.best)
            if executor.leads:
                _print(args, asked, points, best, is_rank)
        if trace is not None and best.best is not None:
            from ficco.report.trace import chrome_trace

            trace.write(chrome_trace(best.best, f"{asked.problem.op} {best.row.schedule}"))
    finally:
        if trace is not None:
            trace.close()
    return 0 if all(point.row.ok for point in points) else 1


@contextmanager
def _executor(args: argparse.Namespace, asked: Asked, is_rank: bool) -> Iterator[Executor]:
    """Yield what runs the problem: this process's rank of a group, or a node with all ranks."""
    if is_rank:
        from ficco.modules.ranks import RankExecutor

        executor = RankExecutor(asked.problem.world, asked.machine, args.compute, args.timeout)
        try:
            yield executor
        finally:
            executor.close()
        return
    from ficco.node import Node  # loads NumPy and the native core

    with Node(
        asked.problem.world, machine=asked.machine, compute=args.compute, timeout_s=args.timeout
    ) as node:
        yield NodeExecutor(node)


def _opened(path: str | None) -> IO[str] | None:
    """Open the trace file before anything runs, so that a bad path costs nothing."""
    if path is None:
        return None
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--trace {path}: {error.strerror}") from None


def _print(
    args: argparse.Namespace, asked: Asked, points: list[Point], best: Point, processes: bool
) -> None:
    from ficco.report.tables import heading, results_table
    from ficco.report.text_timeline import text_timeline

    p, link = asked.problem, asked.machine.link
    rows = [asdict(point.row) for point in points]
    if args.json:
        document = {
            "op": p.op,
            "m": p.m,
            "n": p.n,
            "k": p.k,
            "ranks": p.world,
            "dtype": p.dtype,
            "engine": "host",
            "machine": asked.machine.name,
            "paced": asked.machine.paced,
            "link_gbps": link.peak_gbps if link.paced else None,
            "results": rows,
        }
        print(json.dumps(document))
    to = sys.stderr if args.json else sys.stdout
    where = "a process per rank" if processes else "all ranks in one process"
    print(heading(p, asked.machine, f"{args.compute}, {where}", args.iters), file=to)
    print(results_table(rows), file=to)
    for reason in asked.refused:
        print(reason, file=to)
    if best.best is not None:
        print(f"\n{best.row.schedule}, its fastest run:", file=to)
        print(text_timeline(best.best), file=to)
