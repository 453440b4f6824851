"""`ficco run`: execute schedules, check every result, time them against serial."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import IO, TYPE_CHECKING, Any

from ficco.cli.arguments import Asked, add_problem, asked_from
from ficco.errors import InputError
from ficco.lowering import lower
from ficco.problem import DTYPES
from ficco.schedule import Schedule
from ficco.timeline import Timeline

if TYPE_CHECKING:
    from ficco.node import Node

__all__ = ["Row", "add_to"]


@dataclass(slots=True)
class Row:
    """One schedule's result, as it stands in the JSON."""

    schedule: str
    grain: int
    serial_ms: float = 0.0
    overlap_ms: float = 0.0
    speedup: float = 0.0
    ideal_ms: float = 0.0
    efficiency: float = 0.0
    max_rel_error: float = 0.0
    ok: bool = True
    copies: int = 0
    bytes: int = 0


@dataclass(slots=True)
class _Point:
    """A schedule under measurement."""

    schedule: Schedule
    row: Row
    times_ms: list[float] = field(default_factory=list)
    best: Timeline | None = None


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
    parser.add_argument("--compute", default="numpy", choices=("numpy", "torch"), help="GEMMs by")
    parser.add_argument("--iters", type=int, default=7, help="timed runs (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (%(default)s)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a wait may last")
    parser.add_argument("--trace", metavar="FILE", help="write the best run for Perfetto")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, nothing else")
    parser.set_defaults(main=_main)


def _main(args: argparse.Namespace) -> int:
    asked = asked_from(args)
    if args.iters < 1:
        raise InputError(f"--iters {args.iters}: it is 1 or more")
    if args.seed < 0:
        raise InputError(f"--seed {args.seed}: it is 0 or more")
    from ficco.node import Node  # loads NumPy and the native core

    trace = _opened(args.trace)
    try:
        with Node(
            asked.problem.world, machine=asked.machine, compute=args.compute, timeout_s=args.timeout
        ) as node:
            points, ideal_ms = _measure(node, asked, args.iters, args.seed)
        serial_ms = statistics.median(points[0].times_ms)
        for point in points:
            _finish(point, serial_ms, ideal_ms)
        shown = points[1:] if len(points) > len(asked.schedules) else points
        best = min(shown, key=lambda point: point.row.overlap_ms)
        rows = [point.row for point in shown]
        _print(args, asked, rows, best)
        if trace is not None and best.best is not None:
            from ficco.report.trace import chrome_trace

            trace.write(chrome_trace(best.best, f"{asked.problem.op} {best.row.schedule}"))
    finally:
        if trace is not None:
            trace.close()
    return 0 if all(row.ok for row in rows) else 1


def _opened(path: str | None) -> IO[str] | None:
    """Open the trace file before anything runs, so that a bad path costs nothing."""
    if path is None:
        return None
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--trace {path}: {error.strerror}") from None


def _measure(node: Node, asked: Asked, iters: int, seed: int) -> tuple[list[_Point], float]:
    """Run all schedules in turn, one round after another, each round on fresh inputs.

    Returns the points, a serial one first, and the ideal time: the longer of the whole compute and
    the whole transfer, each as it ran alone within serial.
    """
    from ficco import oracle

    p = asked.problem
    serial = Schedule.named("serial").resolve(p.world, asked.machine)
    schedules = [schedule for schedule in asked.schedules if schedule != serial]
    points = [_Point(s, _row(asked, s)) for s in [serial, *schedules]]
    gemms, transfers = [], []
    for turn in range(iters + 1):  # the first round warms up; it is checked, not timed
        given = oracle.inputs(p, seed + 1000 * turn)
        exact = oracle.results(p, given)
        for point in points:
            begin = time.perf_counter()
            found = node.run(p, given, schedule=point.schedule)
            elapsed_ms = 1e3 * (time.perf_counter() - begin)
            for ys, wanted in zip(found, exact, strict=True):
                for y, want in zip(ys, wanted, strict=True):
                    verdict = oracle.judge(y, want, p.dtype)
                    point.row.ok = point.row.ok and verdict.ok
                    point.row.max_rel_error = max(point.row.max_rel_error, verdict.max_rel_error)
            if turn == 0:
                continue
            if not point.times_ms or elapsed_ms < min(point.times_ms):
                point.best = node.timeline()
            point.times_ms.append(elapsed_ms)
            if point is points[0]:
                gemm_ms, transfer_ms = _alone(node.timeline())
                gemms.append(gemm_ms)
                transfers.append(transfer_ms)
        _progress(f"round {turn} of {iters}")
    _progress("")
    return points, max(statistics.median(gemms), statistics.median(transfers))


def _alone(timeline: Timeline) -> tuple[float, float]:
    """Return how long serial's compute and its transfer lasted, on the slowest rank, in ms."""
    made: dict[int, float] = {}
    for s in timeline.spans:
        if s.kind in ("gemm", "bag"):
            made[s.rank] = made.get(s.rank, 0.0) + s.end_us - s.start_us
    gemm = max(made.values(), default=0.0)
    pushes = [s for s in timeline.spans if s.kind == "copy"]
    transfer = max((s.end_us for s in pushes), default=0.0) - min(
        (s.start_us for s in pushes), default=0.0
    )
    return gemm / 1e3, transfer / 1e3


def _row(asked: Asked, schedule: Schedule) -> Row:
    plan = lower(asked.problem, schedule)
    pushed = [
        region.area * DTYPES[asked.problem.dtype]
        for entry in plan.ranks
        for step in entry.steps
        if step.kind == "copy"
        for region in step.writes
    ]
    return Row(schedule.name, schedule.chunks, copies=len(pushed), bytes=sum(pushed))


def _finish(point: _Point, serial_ms: float, ideal_ms: float) -> None:
    row = point.row
    row.serial_ms = serial_ms
    row.overlap_ms = statistics.median(point.times_ms)
    row.speedup = serial_ms / row.overlap_ms
    row.ideal_ms = ideal_ms
    row.efficiency = ideal_ms / row.overlap_ms


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<40}\r", end="", file=sys.stderr, flush=True)


def _print(args: argparse.Namespace, asked: Asked, rows: list[Row], best: _Point) -> None:
    from ficco.report.tables import heading, results_table
    from ficco.report.text_timeline import text_timeline

    p, link = asked.problem, asked.machine.link
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
            "results": [asdict(row) for row in rows],
        }
        print(json.dumps(document))
    to = sys.stderr if args.json else sys.stdout
    print(heading(p, asked.machine, args.compute, args.iters), file=to)
    print(results_table([asdict(row) for row in rows]), file=to)
    for reason in asked.refused:
        print(reason, file=to)
    if best.best is not None:
        print(f"\n{best.row.schedule}, its fastest run:", file=to)
        print(text_timeline(best.best), file=to)
