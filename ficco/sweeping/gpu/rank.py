"""The process of one rank of a sweep on GPUs: measures what is missing, and says what it found.

What it says, a line of JSON each, is for the process that started it, which alone keeps a journal.
"""

from __future__ import annotations

import gc
import math
import pickle
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ficco
from ficco.modules import groups
from ficco.schedule import Schedule
from ficco.sweeping.figures import medians
from ficco.sweeping.gpu.joining import WAIT_S, Said, grow_windows, leave, open_group
from ficco.sweeping.gpu.launching import Rendezvous
from ficco.sweeping.gpu.measuring import PARTS, Measuring
from ficco.sweeping.gpu.operands import RecvBuffer
from ficco.sweeping.gpu.pieces import pieces_of
from ficco.sweeping.gpu.timing import Config, beat
from ficco.sweeping.gpu.worklist import TODO, Todo, layout_of
from ficco.sweeping.points import Case, Point
from ficco.sweeping.results import extremes, kept, screens
from ficco.sweeping.simulated import timeline_json
from ficco.timeline import Timeline, alone_ms

_LOSS_ROUNDS, _TRACES = 5, 3  # for DIL and CIL
_WHOLE = "gemm beside its pieces"


@dataclass
class _Way:
    """A schedule of a case, which several points have in their regimes."""

    config: Config
    points: dict[str, Point]  # by regime
    sums_travel: bool


class _Swept:
    """A case under way on this rank."""

    def __init__(
        self,
        case: Case,
        todo: Todo,
        rank: int,
        rendezvous: Rendezvous,
        recv: RecvBuffer,
        said: Said,
    ) -> None:
        self._case, self._todo, self._rendezvous, self._said = case, todo, rendezvous, said
        self._told: set[str] = set()
        self._ways: dict[str, _Way] = {}
        self._run = Measuring(layout_of(case.shape), rank, rendezvous, recv, self._tries)
        self._rank = rank
        self._lacking = todo.lacking.get(case.shape.id, {})

    def done(self) -> bool:
        """Measure what is missing; return whether the time sufficed."""
        grid, todo = self._todo.grid, self._todo
        screened = [
            point
            for point in self._able(self._case.points)
            if screens(point, grid) and len(todo.screens.get(point.id, {})) < grid.screening
        ]
        self._prepare(screened)
        for number in range(grid.screening):
            missing = [p for p in screened if number not in todo.screens.get(p.id, {})]
            if missing and not self._round(missing, "screen", number):
                return False
        chosen = [p for regime in self._case.regimes for p in self._kept(regime)]
        self._release(chosen)
        missing = [
            point
            for point in chosen
            if len(todo.runs.get(point.id, {})) < grid.rounds or point.id not in todo.checked
        ]
        parts = self._parts_missing()
        self._prepare(missing)
        alone = self._run.parts(parts)
        self._tell_bad()
        if missing or alone:  # not timed
            self._run.round(self._entries(missing) + [(c, "captured") for c in alone], "warm")
            self._tell_bad()
        for number in range(grid.rounds):
            now = [p for p in missing if number not in todo.runs.get(p.id, {})]
            if (now or alone) and not self._round(now, "run", number, alone):
                return False
        for way in self._ways.values():
            timed = [point for point in way.points.values() if point in missing]
            if not timed:
                continue
            self._run.still_right(way.config)
            self._tell_bad()
            for point in self._able(timed):
                self._said("record", {"id": point.id, "checked": True})
        self._losses(chosen)
        self._timelines()
        return True

    # ---- what is to be done

    def _able(self, points: Sequence[Point]) -> list[Point]:
        return [p for p in points if not p.reason and p.id not in self._todo.bad]

    def _kept(self, regime: str) -> list[Point]:
        return self._able(kept(self._case.of(regime), self._todo, self._todo.grid))

    def _parts_missing(self) -> list[str]:
        found = self._todo.parts.get(self._case.shape.id, {})
        return [
            name
            for name in PARTS
            if name not in self._lacking and len(found.get(name, {})) < self._todo.grid.rounds
        ]

    def _late(self) -> bool:
        return any(self._rendezvous.gather(float(time.time() > self._todo.deadline)))

    # ---- schedules

    def _prepare(self, points: Sequence[Point]) -> None:
        """Warm, check and capture the schedules of points that have not been."""
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
            self._tell_bad()
        self._run.operands.forget()

    def _check(self, way: _Way) -> None:
        """Hold a schedule's result against float64."""
        found: list[Any] = []
        reason = self._run.attempt(
            lambda: found.append(self._run.operands.verdict(way.config.call(0), way.sums_travel))
        )
        if reason:
            self._run.refuse(way.config, reason, tuple(way.points))
            return
        own = found[0].max_rel_error
        error = max(self._rendezvous.gather(math.inf if math.isnan(own) else own))
        if any(self._rendezvous.gather(float(not found[0].ok))):
            reason = f"wrong: relative error {error:.3g}"
            self._run.refuse(way.config, reason, tuple(way.points))
            return
        for point in way.points.values():
            self._said("record", {"id": point.id, "error": error})

    def _release(self, points: Sequence[Point]) -> None:
        """Free the graphs of schedules that run no more."""
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
        self, points: Sequence[Point], what: str, number: int, alone: Sequence[Config] = ()
    ) -> bool:
        """Make one round and say what it gave; return whether the time sufficed."""
        if self._late():
            return False
        known = self._todo.screens if what == "screen" else self._todo.runs
        ids = {(_name(point), point.regime): point.id for point in points}
        entries = self._entries(points) + [(config, "captured") for config in alone]
        for key, found in self._run.round(entries, f"{what} {number}").items():
            ms = statistics.fmean(found)
            if key in ids:
                known.setdefault(ids[key], {})[number] = ms
                self._said("record", {"id": ids[key], what: number, "ms": ms})
            else:
                self._said("record", {"part": key[0], "run": number, "ms": ms})
        self._tell_bad()
        return True

    # ---- what is said

    def _tries(self, name: str) -> None:
        """Say what is tried next: a schedule's points, or a part or a trace."""
        way = self._ways.get(name)
        if way:
            self._said("tries", [p.id for p in way.points.values()])
        else:
            self._said("part", name)

    def _tell_bad(self) -> None:
        for (name, regime), reason in self._run.bad.items():
            way = self._ways.get(name)
            if way is None and name not in self._told:
                self._told.add(name)
                self._said("record", {"part": name, "bad": reason})
            point = way.points.get(regime) if way else None
            if point is None or point.id in self._told:
                continue
            self._told.add(point.id)
            kind = "wrong" if "wrong: " in reason else "failed"
            self._todo.bad[point.id] = reason
            self._said("record", {"id": point.id, "bad": reason, "kind": kind})

    def _losses(self, points: Sequence[Point]) -> None:
        """Measure DIL and CIL of the points that cuBLAS multiplies for in pieces."""
        run, operands = self._run, self._run.operands
        alone: dict[str, Config] = {}
        for point in self._able(points):
            name = f"pieces of {_name(point)}"
            known = point.id in self._todo.lost or name in self._lacking or _name(point) in alone
            if known or point.name == "serial":
                continue
            assert point.schedule is not None, point.id
            pieces = run.part(name, partial(pieces_of, operands, point.schedule))
            if pieces is not None:
                alone[_name(point)] = pieces
        whole = None
        if alone and _WHOLE not in self._lacking:
            whole = run.part(_WHOLE, operands.gemm)
        self._tell_bad()
        if whole is None:
            return
        entries = [(config, "captured") for config in (whole, *alone.values())]
        found = medians(run.rounds(entries, _LOSS_ROUNDS, 1))
        self._tell_bad()
        for name, config in alone.items():
            point = next(p for p in points if _name(p) == name)
            in_call = self._in_call(point)
            whole_ms, pieces_ms = (found.get((c.name, "captured")) for c in (whole, config))
            if in_call is None or not whole_ms or not pieces_ms:
                continue
            figures = {"dil": round(pieces_ms / whole_ms, 4), "cil": round(in_call / pieces_ms, 4)}
            for p in points:
                if _name(p) == name:
                    self._said("record", {"id": p.id, **figures})

    def _in_call(self, point: Point) -> float | None:
        """Return how long the GEMMs of a call last in it, in ms, on the slowest rank."""
        trace = _trace_of(point)
        if trace in self._lacking:
            return None
        self._tries(trace)
        found: list[Timeline] = []
        for _ in range(_TRACES):
            if self._run.attempt(partial(self._trace, point, found)):
                self._run.revive()
                return None
        return statistics.median(
            max(self._rendezvous.gather(alone_ms(timeline)[0])) for timeline in found
        )

    def _timelines(self) -> None:
        """Take the timelines of the best and the worst point; NCCL's calls have none."""
        for regime in self._case.regimes:
            planned = tuple(
                point
                for point in self._case.of(regime)
                if point.schedule is not None and point.schedule.transport != "collective"
            )
            case = Case(self._case.shape, (regime,), planned)
            for which, point in extremes(case, regime, self._todo, self._todo.grid):
                if (self._case.shape.id, regime, which) in self._todo.drawn:
                    continue
                trace = _trace_of(point)
                if trace in self._lacking:
                    continue
                self._tries(trace)
                found: list[Timeline] = []
                reason = self._run.attempt(partial(self._trace, point, found))
                if reason:
                    self._said("say", f"{point.id}: no timeline: {reason}")
                    self._run.revive()
                    continue
                gathered: list[Any] = [None] * self._case.shape.world
                dist.all_gather_object(gathered, found[0])
                about = {"regime": regime, "which": which, "id": point.id}
                table = timeline_json(Timeline.joined(gathered))
                self._said("record", {**about, "timeline": table})

    def _trace(self, point: Point, found: list[Timeline]) -> None:
        """Add this rank's timeline of one more call."""
        assert point.schedule is not None, point.id
        runtime = groups.gpu_runtime(None, torch.device("cuda", self._rank))
        assert runtime is not None, "ranks that fall back do not come here"
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
        found.append(runtime.timeline())


def _name(point: Point) -> str:
    """Return what points of one schedule have in common."""
    schedule: Schedule | None = point.schedule
    return f"{point.name} {schedule}"


def _trace_of(point: Point) -> str:
    """Return how the journal calls the trace of a point."""
    return f"trace of {point.id}"


def main(folder: Path) -> int:
    """Measure the cases of a folder's TODO until the deadline."""
    todo: Todo = pickle.loads((folder / TODO).read_bytes())
    rank, world = open_group(folder)
    # As ficco's calls do it, sums of 16-bit products are float32 throughout.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    rendezvous, said = Rendezvous(folder, rank, world, WAIT_S), Said(folder, rank)
    beat()
    ficco.prepare(machine="cuda", timeout_s=todo.timeout_s)
    reason = ficco.fallback_reason()
    if reason:
        raise RuntimeError(f"ficco would run plain torch.distributed: {reason}")
    recv = RecvBuffer()
    grow_windows([layout_of(case.shape) for case in todo.cases], rank)
    for case in todo.cases:
        said("begin", case.shape.id)
        said("tries", [point.id for point in case.able if point.id not in todo.bad])
        if not _Swept(case, todo, rank, rendezvous, recv, said).done():
            said("late", True)
            break
        said("record", {"ended": True})
        gc.collect()
        torch.cuda.empty_cache()
    said("done", True)
    return leave()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
