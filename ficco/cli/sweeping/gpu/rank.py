"""The process of one rank of a sweep on GPUs: measure the missing points, and report the results.

The reports, one line of JSON each, are for the launcher, which alone writes the journal.
"""

from __future__ import annotations

import gc
import math
import pickle
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ficco
from ficco.api import groups
from ficco.cli.sweeping.gpu.session import TODO, Todo, layout_of
from ficco.cli.sweeping.points import Case, Point
from ficco.cli.sweeping.results import medians, points_to_time, screens, undrawn
from ficco.cli.sweeping.simulated import timeline_json
from ficco.measure.cases import RecvBuffer, pieces_of
from ficco.measure.clock import Config, beat
from ficco.measure.launching import Rendezvous
from ficco.measure.ranks import WAIT_S, RankLog, grow_windows, leave, open_group
from ficco.measure.rounds import PARTS, Measuring
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import Timeline, alone_ms

_LOSS_ROUNDS, _TRACES = 5, 3  # for DIL and CIL
_WHOLE = "gemm beside its pieces"


@dataclass
class _Way:
    """A schedule of a case; several points use it, one per regime."""

    config: Config
    points: dict[str, Point]  # by regime
    sums_travel: bool


class _CaseRun:
    """The measurement of one case on this rank."""

    def __init__(
        self,
        case: Case,
        todo: Todo,
        rank: int,
        rendezvous: Rendezvous,
        recv: RecvBuffer,
        rank_log: RankLog,
    ) -> None:
        self._case, self._todo, self._rendezvous, self._rank_log = case, todo, rendezvous, rank_log
        self._recorded: set[str] = set()
        self._ways: dict[str, _Way] = {}
        self._run = Measuring(layout_of(case.shape), rank, rendezvous, recv, self._tries)
        self._rank, self._known = rank, todo.known
        self._lacking = todo.known.lacking.setdefault(case.shape.id, {})

    def done(self) -> bool:
        """Measure the missing points; return False if the time ran out."""
        grid, known = self._todo.grid, self._known
        screened = [
            point
            for point in self._able(self._case.points)
            if screens(point, grid) and len(known.screens.get(point.id, {})) < grid.screening
        ]
        self._prepare(screened)
        for number in range(grid.screening):
            missing = [p for p in screened if number not in known.screens.get(p.id, {})]
            if missing and not self._round(missing, "screen", number):
                return False
        chosen = [p for regime in self._case.regimes for p in self._points_to_time(regime)]
        self._release(chosen)
        missing = [
            point
            for point in chosen
            if known.missing(point.id, grid.rounds) or point.id not in known.checked
        ]
        parts = self._parts_missing()
        self._prepare(missing)
        alone = self._run.parts(parts)
        self._record_bad()
        if missing or alone:  # warm-up round
            self._run.round(self._entries(missing) + [(c, "captured") for c in alone], "warm")
            self._record_bad()
        for number in range(grid.rounds):
            now = [p for p in missing if number not in known.runs.get(p.id, {})]
            if (now or alone) and not self._round(now, "run", number, alone):
                return False
        for way in self._ways.values():
            timed = [point for point in way.points.values() if point in missing]
            if not timed:
                continue
            self._run.check_again(way.config)
            self._record_bad()
            for point in self._able(timed):
                self._record(id=point.id, checked=True)
        self._losses(chosen)
        self._timelines()
        return True

    # ---- work to do

    def _able(self, points: Sequence[Point]) -> list[Point]:
        return [p for p in points if not p.reason and p.id not in self._known.bad]

    def _points_to_time(self, regime: str) -> list[Point]:
        return self._able(points_to_time(self._case.of(regime), self._known, self._todo.grid))

    def _parts_missing(self) -> list[str]:
        part_runs = self._known.parts.get(self._case.shape.id, {})
        return [
            name
            for name in PARTS
            if name not in self._lacking and len(part_runs.get(name, {})) < self._todo.grid.rounds
        ]

    def _late(self) -> bool:
        return any(self._rendezvous.gather(float(time.time() > self._todo.deadline)))

    # ---- schedules

    def _prepare(self, points: Sequence[Point]) -> None:
        """Warm up, check and capture the points' schedules that are not prepared yet."""
        for point in points:
            name = _name(point)
            if name in self._ways:
                continue
            regimes = {p.regime: p for p in self._able(self._case.points) if _name(p) == name}
            schedule = point.schedule
            assert schedule is not None, point.id
            plain = point.name == "serial"
            call = self._run.operands.serial if plain else self._run.operands.ficco(schedule)
            way = _Way(Config(name, call), regimes, schedule.sums_travel)
            self._ways[name] = way
            if not plain:
                self._run.ours.append(way.config)
            if self._run.ready(way.config, tuple(regimes)):
                self._check(way)
            else:
                self._run.ours = [c for c in self._run.ours if c is not way.config]
            self._record_bad()
        self._run.operands.forget()

    def _check(self, way: _Way) -> None:
        """Compare a schedule's result with float64."""
        verdicts: list[Any] = []
        reason = self._run.attempt(
            lambda: verdicts.append(self._run.operands.verdict(way.config.call(0), way.sums_travel))
        )
        if reason:
            self._run.refuse(way.config, reason, tuple(way.points))
            return
        own_error = verdicts[0].max_rel_error
        error = max(self._rendezvous.gather(math.inf if math.isnan(own_error) else own_error))
        if any(self._rendezvous.gather(float(not verdicts[0].ok))):
            reason = f"wrong: relative error {error:.3g}"
            self._run.refuse(way.config, reason, tuple(way.points))
            return
        for point in way.points.values():
            self._record(id=point.id, error=error)

    def _release(self, points: Sequence[Point]) -> None:
        """Free the graphs of schedules that do not run again."""
        names = {_name(point) for point in points}
        for name, way in self._ways.items():
            if name not in names:
                way.config.graph = way.config.last = None
                self._run.ours = [c for c in self._run.ours if c is not way.config]

    # ---- rounds

    def _entries(self, points: Sequence[Point]) -> list[tuple[Config, str]]:
        able = {point.id for point in self._able(points)}
        return [(self._ways[_name(p)].config, p.regime) for p in points if p.id in able]

    def _round(
        self, points: Sequence[Point], kind: str, number: int, alone: Sequence[Config] = ()
    ) -> bool:
        """Run one round and report its times; return False if the time ran out."""
        if self._late():
            return False
        ids = {(_name(point), point.regime): point.id for point in points}
        entries = self._entries(points) + [(config, "captured") for config in alone]
        for key, run_times in self._run.round(entries, f"{kind} {number}").items():
            ms = statistics.fmean(run_times)
            if key in ids:
                self._record(id=ids[key], **{kind: number}, ms=ms)
            else:
                self._record(part=key[0], run=number, ms=ms)
        self._record_bad()
        return True

    # ---- reports

    def _tries(self, name: str) -> None:
        """Report what runs next: a schedule's points, a part or a trace."""
        way = self._ways.get(name)
        if way:
            self._rank_log("tries", [p.id for p in way.points.values()])
        else:
            self._rank_log("part", name)

    def _record(self, **record: Any) -> None:
        """Add a record, which is equal on all ranks, and report it."""
        self._known.take({"shape": self._case.shape.id, **record})
        self._rank_log("record", record)

    def _record_bad(self) -> None:
        for (name, regime), reason in self._run.bad.items():
            way = self._ways.get(name)
            if way is None and name not in self._recorded:
                self._recorded.add(name)
                self._record(part=name, bad=reason)
            point = way.points.get(regime) if way else None
            if point is None or point.id in self._recorded:
                continue
            self._recorded.add(point.id)
            kind = "wrong" if "wrong: " in reason else "failed"
            self._record(id=point.id, bad=reason, kind=kind)

    def _losses(self, points: Sequence[Point]) -> None:
        """Measure DIL and CIL of the points whose GEMMs are cuBLAS calls in pieces."""
        run, operands = self._run, self._run.operands
        alone: dict[str, Config] = {}
        for point in self._able(points):
            name = f"pieces of {_name(point)}"
            lost = "dil" in self._known.worked_out.get(point.id, {})
            skipped = lost or name in self._lacking or _name(point) in alone
            if skipped or point.name == "serial":
                continue
            assert point.schedule is not None, point.id
            pieces = run.part(name, partial(pieces_of, operands, point.schedule))
            if pieces is not None:
                alone[_name(point)] = pieces
        whole = None
        if alone and _WHOLE not in self._lacking:
            whole = run.part(_WHOLE, operands.gemm)
        self._record_bad()
        if whole is None:
            return
        entries = [(config, "captured") for config in (whole, *alone.values())]
        medians_ms = medians(run.rounds(entries, _LOSS_ROUNDS, 1))
        self._record_bad()
        for name, config in alone.items():
            point = next(p for p in points if _name(p) == name)
            in_call = self._in_call(point)
            whole_ms, pieces_ms = (medians_ms.get((c.name, "captured")) for c in (whole, config))
            if in_call is None or not whole_ms or not pieces_ms:
                continue
            figures = {"dil": round(pieces_ms / whole_ms, 4), "cil": round(in_call / pieces_ms, 4)}
            for p in points:
                if _name(p) == name:
                    self._record(id=p.id, **figures)

    def _in_call(self, point: Point) -> float | None:
        """Return the time of the GEMMs within a call, in ms, on the slowest rank."""
        trace = _trace_of(point)
        if trace in self._lacking:
            return None
        self._tries(trace)
        timelines: list[Timeline] = []
        for _ in range(_TRACES):
            if self._run.attempt(partial(self._trace, point, timelines)):
                self._run.revive()
                return None
        return statistics.median(
            max(self._rendezvous.gather(alone_ms(timeline)[0])) for timeline in timelines
        )

    def _timelines(self) -> None:
        """Record the timelines of the best and the worst point; NCCL's calls have none."""
        planned = tuple(
            point
            for point in self._case.points
            if point.schedule is not None and point.schedule.transport != "collective"
        )
        case = replace(self._case, points=planned)
        for regime, which, point in undrawn(case, self._known, self._todo.grid):
            trace = _trace_of(point)
            if trace in self._lacking:
                continue
            self._tries(trace)
            timelines: list[Timeline] = []
            reason = self._run.attempt(partial(self._trace, point, timelines))
            if reason:
                self._rank_log("say", f"{point.id}: no timeline: {reason}")
                self._run.revive()
                continue
            gathered: list[Any] = [None] * self._case.shape.world
            dist.all_gather_object(gathered, timelines[0])
            table = timeline_json(Timeline.joined(gathered))
            self._record(regime=regime, which=which, id=point.id, timeline=table)

    def _trace(self, point: Point, timelines: list[Timeline]) -> None:
        """Make one more call, and append this rank's timeline."""
        assert point.schedule is not None, point.id
        runtime = groups.gpu_runtime(None, torch.device("cuda", self._rank))
        assert runtime is not None, "ranks that fall back do not get here"
        call = self._run.operands.ficco(point.schedule)
        call(0)
        torch.cuda.synchronize()
        self._rendezvous.gather()
        runtime.traced = True
        try:
            call(1)
            torch.cuda.synchronize()
        finally:
            runtime.traced = False
        timelines.append(runtime.timeline())


def _name(point: Point) -> str:
    """Return a name that is equal for all points of one schedule."""
    schedule: Schedule | None = point.schedule
    return f"{point.name} {schedule}"


def _trace_of(point: Point) -> str:
    """Return the journal's name for the trace of a point."""
    return f"trace of {point.id}"


def main(folder: Path) -> int:
    """Measure the cases of a folder's TODO until the deadline."""
    todo: Todo = pickle.loads((folder / TODO).read_bytes())
    rank, world = open_group(folder)
    # As in ficco's calls, sums of 16-bit products stay in float32.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    rendezvous, rank_log = Rendezvous(folder, rank, world, WAIT_S), RankLog(folder, rank)
    beat()
    ficco.prepare(machine="cuda", timeout_s=todo.timeout_s)
    reason = ficco.fallback_reason()
    if reason:
        raise RuntimeError(f"ficco would run plain torch.distributed: {reason}")
    recv = RecvBuffer()
    grow_windows([layout_of(case.shape) for case in todo.cases], rank)
    for case in todo.cases:
        rank_log("begin", case.shape.id)
        rank_log("tries", [point.id for point in case.able if point.id not in todo.known.bad])
        if not _CaseRun(case, todo, rank, rendezvous, recv, rank_log).done():
            rank_log("late", True)
            break
        rank_log("record", {"ended": True})
        gc.collect()
        torch.cuda.empty_cache()
    rank_log("done", True)
    return leave()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
