"""Measures one case on this rank: check, screen all points, time the best of them, check again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from comparing import summary
from comparing.cases import Case, points
from comparing.launch import Meeting
from comparing.operands import TOLERANCE, Landing, Operands
from comparing.timing import Config, Timer, beat, calls_for

FUSED = ("all_gather_matmul", "matmul_reduce_scatter")
Key = tuple[str, str]


@dataclass(frozen=True)
class Settings:
    """What a run is asked for."""

    grains: tuple[int | str, ...] = (1, 2, 4, "world")
    rounds: int = 20
    screening_rounds: int = 3
    keep: int = 2


class Measuring:
    """A case under way on this rank. All ranks make the same calls in the same order."""

    def __init__(
        self, case: Case, rank: int, meeting: Meeting, settings: Settings, landing: Landing
    ) -> None:
        self.case, self.settings, self._meeting = case, settings, meeting
        self.operands = Operands(case, rank)
        self._landing, self._rank = landing, rank
        self.bad: dict[Key, str] = {}
        self.alone: list[Config] = []
        self.ours: list[Config] = []
        self.pool = torch.cuda.graph_pool_handle()
        self.timer = Timer(meeting, calls_for(self._estimate_ms()))

    def _estimate_ms(self) -> float:
        for i in range(2):
            self.operands.serial(i)
        config = Config("serial", self.operands.serial)
        return max(self._meeting.gather(Timer(self._meeting, 2).run(config, "eager")[0]))

    # ---- agreeing

    def attempt(self, action: Callable[[], Any]) -> str:
        """Do something that may fail; return why it did, on any rank."""
        beat()
        reason = ""
        try:
            action()
            torch.cuda.synchronize()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:600]
        failed = [r for r, value in enumerate(self._meeting.gather(float(bool(reason)))) if value]
        return reason or (f"failed on ranks {failed}" if failed else "")

    def _wrong(self, y: torch.Tensor, i: int) -> str:
        error = self.operands.error(y, i)
        worst = max(self._meeting.gather(float("inf") if math.isnan(error) else error))
        return "" if worst < TOLERANCE else f"wrong: relative error {worst:.3g}"

    def _slowest(self, times: dict[Key, list[float]]) -> dict[Key, list[float]]:
        """Return every run's figure of the slowest rank."""
        flat = [value for found in times.values() for value in found]
        whole = torch.tensor(flat, dtype=torch.float64, device="cuda")
        if flat:
            dist.all_reduce(whole, dist.ReduceOp.MAX)
        values = iter(whole.tolist())
        return {key: [next(values) for _ in found] for key, found in times.items()}

    # ---- one configuration

    def ready(self, config: Config, regimes: tuple[str, ...] = summary.REGIMES) -> bool:
        """Warm a configuration, hold its results against plain torch, and capture it."""
        last = (self.timer.calls - 1) % self.operands.sets
        for i in (0, last):
            kept: list[torch.Tensor] = []
            reason = self.attempt(lambda i=i, kept=kept: kept.append(config.call(i)))
            if reason or (reason := self._wrong(kept[0], i)):
                self.refuse(config, reason, regimes)
                return False
        self.captured(config)
        return True

    def captured(self, config: Config) -> None:
        """Capture a configuration that has run."""
        reason = self.attempt(lambda: self.timer.capture(config, self.pool))
        if reason:
            config.graph = config.last = None
            self.bad[config.name, "captured"] = f"capture: {reason}"
            self._revive()

    def refuse(self, config: Config, reason: str, regimes: tuple[str, ...]) -> None:
        """Note why a configuration has no figures."""
        self.bad |= {(config.name, regime): reason for regime in regimes}
        self._revive()

    def still_right(self, config: Config) -> None:
        """Hold results against plain torch again: an eager call, and a replay over NaN."""
        last = self.timer.calls - 1
        kept: list[torch.Tensor] = []
        reason = self.attempt(lambda: kept.extend([config.call(0), config.call(1)]))
        reason = reason or self._wrong(kept[1], 1)
        if reason:
            self.refuse(config, f"after timing: {reason}", ("eager", "synchronized"))
        if config.graph is None:
            return

        def replay() -> None:
            config.last.fill_(torch.nan)
            config.graph.replay()

        reason = self.attempt(replay) or self._wrong(config.last, last)
        if reason:
            self.refuse(config, f"after timing: {reason}", ("captured",))

    def _revive(self) -> None:
        """Make ficco's group usable again, if a call on it failed; all ranks come here."""
        import ficco

        if not self.attempt(ficco.synchronize):
            return
        self.attempt(ficco.reset)
        # Graphs run in windows that the group has left.
        lost = [config for config in self.ours if config.graph is not None]
        for config in lost:
            config.graph = config.last = None
        for config in lost:
            if (config.name, "eager") in self.bad:
                continue
            reason = self.attempt(lambda config=config: [config.call(i) for i in (0, 1)])
            if reason:
                self.bad |= {(config.name, regime): reason for regime in summary.REGIMES}
            else:
                self.captured(config)

    # ---- rounds

    def rounds(self, entries: list[tuple[Config, str]], count: int, drop: int) -> dict[Key, Any]:
        """Time all entries round by round, each round in an order that is equal on all ranks."""
        times: dict[Key, list[float]] = {(config.name, regime): [] for config, regime in entries}
        dead: set[str] = set()
        for number in range(drop + count):
            order = list(entries)
            random.Random(f"{self.case.id} {number} {count}").shuffle(order)
            for config, regime in order:
                if config.name in dead or (regime == "captured" and config.graph is None):
                    continue
                found: list[float] = []
                reason = self.attempt(
                    lambda c=config, r=regime, found=found: found.extend(self.timer.run(c, r))
                )
                if reason:
                    dead.add(config.name)
                    self.refuse(config, reason, summary.REGIMES)
                elif number >= drop:
                    times[config.name, regime] += found
        right = {key: found for key, found in times.items() if key not in self.bad}
        return self._slowest(right)

    def entries(self, configs: list[Config]) -> list[tuple[Config, str]]:
        """Return configurations in all regimes that they have."""
        return [
            (config, regime)
            for config in configs
            for regime in summary.REGIMES
            if (config.name, regime) not in self.bad
        ]

    def parts(self) -> list[Config]:
        """Return the GEMM alone and the transfers alone, captured."""
        operands = self.operands
        makers: dict[str, Callable[[], Any]] = {
            "gemm": operands.gemm,
            "transfer nccl": operands.nccl,
            "transfer push": lambda: operands.push(self._landing.places(self.case, self._rank)),
        }
        for name, make in makers.items():
            made: list[Config] = []

            def warm(name: str = name, make: Any = make, made: list[Config] = made) -> None:
                made.append(Config(name, make()))
                made[0].call(0)
                made[0].call(1)

            reason = self.attempt(warm)
            if reason:
                self.bad[name, "captured"] = reason
                continue
            self.captured(made[0])
            if made[0].graph is not None:
                self.alone.append(made[0])
        return self.alone


def about(schedule: Any, asked: Any) -> dict[str, Any]:
    """Say what a point is; `asked_` where it is not as the named schedule or machine has it."""
    found = {"schedule": schedule.name, "grain": schedule.chunks}
    found |= {"route": schedule.route, "order": schedule.order}
    if asked.route != "machine" and schedule.name != "shard_p2p":
        found["asked_route"] = asked.route
    if asked.order == "by_peer" and schedule.name != "shard_p2p":
        found["asked_order"] = asked.order
    if asked.pace == "in_step":
        found["asked_pace"] = asked.pace
    return found


def measure(
    case: Case, rank: int, meeting: Meeting, settings: Settings, landing: Landing
) -> dict[str, Any]:
    """Return a case's result, equal on all ranks. A collective call."""
    from ficco.machine import Machine

    run = Measuring(case, rank, meeting, settings, landing)
    baselines = [Config("serial", run.operands.serial)]
    if case.op in FUSED:
        baselines.append(Config("torch_fused", run.operands.torch_fused))
    baselines = [config for config in baselines if run.ready(config)]
    alone = run.parts()
    machine = Machine.named("cuda")
    ours = run.ours
    for asked in points(case, settings.grains):
        schedule = asked.resolve(case.world, machine)
        facts = about(schedule, asked)
        name = f"{schedule.name} g{schedule.chunks} {schedule.route} {schedule.order}"
        name += " in_step" if schedule.pace == "in_step" else ""
        ours.append(Config(name, run.operands.ficco(schedule), facts))
    known = {config.name: config.about for config in ours}
    ours = run.ours = [config for config in ours if run.ready(config)]

    screened = run.rounds(run.entries(ours), settings.screening_rounds, 0)
    chosen = summary.best_points(screened, settings.keep)
    kept = {name for names in chosen.values() for name in names}
    for config in ours:
        if config.name not in kept:
            config.graph = config.last = None
    entries = run.entries(baselines) + [(config, "captured") for config in alone]
    entries += [
        (config, regime) for config, regime in run.entries(ours) if config.name in chosen[regime]
    ]
    times = run.rounds(entries, settings.rounds, 1)
    for config in ours:
        if config.name in kept:
            run.still_right(config)

    apart = {config.name for config in alone}
    parts = summary.ideal({key: found for key, found in times.items() if key[0] in apart})
    compared = {key: found for key, found in times.items() if key[0] not in apart}
    regimes = summary.regime_rows(compared, known, run.bad)
    for rows in regimes.values():  # why a part has no figure stands below
        rows[:] = [row for row in rows if not row["config"].startswith(("gemm", "transfer "))]
    missing = {name: why for (name, _), why in run.bad.items() if name.startswith("transfer ")}
    return {
        **case.facts(), **parts, "parts_missing": missing, "calls_a_run": run.timer.calls,
        "regimes": regimes, **summary.conclusions(regimes, parts["ideal_ms"]),
        "screened": summary.screening(screened),
    }  # fmt: skip
