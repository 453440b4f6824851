"""Measurement of one shape on this rank: check, capture, time and check again configurations.

All ranks make the same calls in the same order. An action that fails on one rank fails on all, with
a reason, and the group is made usable again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ficco.measure.cases import TOLERANCE, Operands, RecvBuffer, Run
from ficco.measure.clock import Config, Timer, beat, calls_for
from ficco.measure.launching import Rendezvous
from ficco.measure.layout import Layout
from ficco.plan.timeline import REGIMES

PARTS = ("gemm", "transfer nccl", "transfer push")
Key = tuple[str, str]  # a configuration's name, and a regime


class Measuring:
    """The measurement of one shape.

    Args:
        layout: the shape.
        rank: this rank.
        rendezvous: synchronizes the ranks.
        recv: memory for transfers alone.
        tries: receives a configuration's name before it runs, so that the launcher knows which one
            ended the ranks.

    Attributes:
        bad: why configurations have no figures, by name and regime.
        ours: ficco's configurations; their graphs are captured again after a reset of the group.
        alone: the GEMM alone and transfers alone.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        rendezvous: Rendezvous,
        recv: RecvBuffer,
        tries: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.layout, self.rendezvous, self._tries = layout, rendezvous, tries
        self.operands = Operands(layout, rank)
        self._recv, self._rank = recv, rank
        self.bad: dict[Key, str] = {}
        self.alone: list[Config] = []
        self.ours: list[Config] = []
        self.pool = torch.cuda.graph_pool_handle()
        self.timer = Timer(rendezvous, calls_for(self._estimate_ms()))

    def _estimate_ms(self) -> float:
        for i in range(2):
            self.operands.serial(i)
        config = Config("serial", self.operands.serial)
        return max(self.rendezvous.gather(Timer(self.rendezvous, 2).run(config, "eager")[0]))

    # ---- agreement of ranks

    def attempt(self, action: Callable[[], Any]) -> str:
        """Run an action that may fail; return why it failed on any rank, else an empty string."""
        beat()
        reason = ""
        try:
            action()
            torch.cuda.synchronize()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:600]
        failed = [r for r, value in enumerate(self.rendezvous.gather(float(bool(reason)))) if value]
        return reason or (f"failed on ranks {failed}" if failed else "")

    def _wrong(self, y: torch.Tensor, i: int) -> str:
        error = self.operands.error(y, i)
        worst = max(self.rendezvous.gather(float("inf") if math.isnan(error) else error))
        return "" if worst < TOLERANCE else f"wrong: relative error {worst:.3g}"

    def _slowest(self, times: dict[Key, list[float]]) -> dict[Key, list[float]]:
        """Return every run's time on the slowest rank."""
        flat = [value for values in times.values() for value in values]
        slowest = torch.tensor(flat, dtype=torch.float64, device="cuda")
        if flat:
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        slowest_values = iter(slowest.tolist())
        return {key: [next(slowest_values) for _ in values] for key, values in times.items()}

    # ---- one configuration

    def ready(self, config: Config, regimes: tuple[str, ...] = REGIMES) -> bool:
        """Warm up a configuration, compare its results with plain torch, and capture it."""
        self._tries(config.name)
        last = (self.timer.calls - 1) % self.operands.sets
        for i in (0, last):
            results: list[torch.Tensor] = []
            reason = self.attempt(partial(_keep, results, config, i))
            if reason or (reason := self._wrong(results[0], i)):
                self.refuse(config, reason, regimes)
                return False
        if "captured" in regimes:
            self.captured(config)
        return True

    def captured(self, config: Config) -> None:
        """Capture a configuration that has run."""
        reason = self.attempt(lambda: self.timer.capture(config, self.pool))
        if reason:
            config.graph = config.last = None
            self.bad[config.name, "captured"] = f"capture: {reason}"
            self.revive()

    def refuse(self, config: Config, reason: str, regimes: tuple[str, ...]) -> None:
        """Record why a configuration has no figures."""
        self.bad |= {(config.name, regime): reason for regime in regimes}
        self.revive()

    def check_again(self, config: Config) -> None:
        """Compare results with plain torch again: of an eager call, and of a replay over NaN."""
        self._tries(config.name)
        last = self.timer.calls - 1
        results: list[torch.Tensor] = []
        reason = self.attempt(partial(_keep, results, config, 0, 1))
        reason = reason or self._wrong(results[1], 1)
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

    def revive(self) -> None:
        """Make ficco's group usable again if a call on it failed; all ranks call this."""
        import ficco

        if not self.attempt(ficco.synchronize):
            return
        self.attempt(ficco.reset)
        # The graphs use windows that the reset group no longer has.
        lost = [config for config in self.ours if config.graph is not None]
        for config in lost:
            config.graph = config.last = None
        for config in lost:
            if (config.name, "eager") in self.bad:
                continue
            reason = self.attempt(partial(_keep, [], config, 0, 1))
            if reason:
                self.bad |= {(config.name, regime): reason for regime in REGIMES}
            else:
                self.captured(config)

    # ---- rounds

    def rounds(self, entries: list[tuple[Config, str]], count: int, drop: int) -> dict[Key, Any]:
        """Time all entries round by round; return the times of the slowest rank.

        Args:
            entries: configurations and regimes.
            count: rounds that count.
            drop: earlier rounds, which are dropped.
        """
        times: dict[Key, list[float]] = {(config.name, regime): [] for config, regime in entries}
        for number in range(drop + count):
            for key, run_times in self.round(entries, f"{number} {count}").items():
                if number >= drop:
                    times[key] += run_times
        return {key: run_times for key, run_times in times.items() if key not in self.bad}

    def round(self, entries: list[tuple[Config, str]], name: str) -> dict[Key, list[float]]:
        """Time all entries once; return the times of the slowest rank.

        Args:
            entries: configurations and regimes; bad ones are skipped.
            name: the round's name, equal on all ranks; it determines the order.
        """
        times: dict[Key, list[float]] = {}
        order = list(entries)
        random.Random(f"{self.layout.id} {name}").shuffle(order)
        for config, regime in order:
            key = (config.name, regime)
            if key in self.bad or (regime == "captured" and config.graph is None):
                continue
            self._tries(config.name)
            run_times: list[float] = []
            reason = self.attempt(partial(self._time, config, regime, run_times))
            if reason:
                self.refuse(config, reason, REGIMES)
            else:
                times[key] = run_times
        return self._slowest(
            {key: run_times for key, run_times in times.items() if key not in self.bad}
        )

    def _time(self, config: Config, regime: str, times: list[float]) -> None:
        times += self.timer.run(config, regime)

    def entries(self, configs: list[Config]) -> list[tuple[Config, str]]:
        """Return the configurations in each regime in which they are not bad."""
        return [
            (config, regime)
            for config in configs
            for regime in REGIMES
            if (config.name, regime) not in self.bad
        ]

    def parts(self, names: Sequence[str] = PARTS) -> list[Config]:
        """Return the GEMM alone and the transfers alone, captured; without those that failed."""
        operands = self.operands
        makers: dict[str, Callable[[], Run]] = {
            "gemm": operands.gemm,
            "transfer nccl": operands.nccl,
            "transfer push": lambda: operands.push(self._recv.places(self.layout, self._rank)),
        }
        configs = [self.part(name, makers[name]) for name in names]
        self.alone += [config for config in configs if config is not None]
        return self.alone

    def part(self, name: str, make: Callable[[], Run | None]) -> Config | None:
        """Build, warm up and capture a part that runs alone; report its name to `tries` first.

        Args:
            name: the part's name.
            make: builds the part's call; it may fail, or return None if there is nothing to run.

        Returns:
            None if there is nothing to run, or if the part failed: `bad` says why.
        """
        self._tries(name)
        configs: list[Config] = []

        def warm() -> None:
            call = make()
            if call is not None:
                configs.append(Config(name, call))
                call(0)
                call(1)

        reason = self.attempt(warm)
        if reason:
            self.bad[name, "captured"] = reason
        elif configs:
            self.captured(configs[0])
        return configs[0] if configs and configs[0].graph is not None else None


def _keep(results: list[torch.Tensor], config: Config, *numbers: int) -> None:
    """Call a configuration and append the results."""
    results += [config.call(number) for number in numbers]
