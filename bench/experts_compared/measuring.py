"""Measure one point on a rank: make the ways, check each, time them in turn."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import ficco
from experts_compared import by_ficco, by_nccl, points
from experts_compared.alone import Alone
from experts_compared.by_symmetric import Symmetric
from experts_compared.layer import Layer, relative_error
from experts_compared.pieces import Sums
from ficco.measure.clock import Config, Timer, beat
from ficco.measure.launching import Rendezvous

__all__ = ["Asked", "Measuring", "figures", "measure"]

TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-4}  # of a token, by 2-norms
LEAST_ROUNDS = 5
NEEDED_S = 2.0  # time to prepare a way
TURN = 3  # another routing, for the check of a graph
Tensor = torch.Tensor


@dataclass(frozen=True)
class Asked:
    """Options of a point.

    Attributes:
        ways: names, as in `points.WAYS`.
        regimes: of forward passes.
        rounds: number of rounds.
        limit_s: time limit of the rounds; LEAST_ROUNDS run anyway.
        end: deadline, a value of time.time().
        skipped: ways that are left out, and why.
        tries: receives the name of each way before it runs.
        sharing: whether ranks share GPUs.
    """

    ways: Sequence[str]
    regimes: Sequence[str]
    rounds: int
    limit_s: float
    end: float
    skipped: dict[str, str]
    tries: Callable[[str], None]
    sharing: bool


def figures(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the 10th and 90th percentile, and the number of values."""
    ordered = sorted(values)
    tenths = statistics.quantiles(ordered, n=10, method="inclusive") if len(ordered) > 1 else []
    low, high = (tenths[0], tenths[-1]) if tenths else (ordered[0], ordered[0])
    middle = statistics.median(ordered)
    return {
        "median": round(middle, 4), "p10": round(low, 4), "p90": round(high, 4),
        "runs": len(ordered),
    }  # fmt: skip


def calls_for(call_ms: float) -> int:
    """Return the number of calls in a run: even, so that all layers' weights are used alike."""
    if call_ms < 1.5:
        return points.SETS
    return 4 if call_ms < 5.0 else 2


class Measuring:
    """The measurement of a point. All ranks make the same calls in the same order.

    Attributes:
        refused: why a way has no figures, by its name, or by its name and the regime.
        sums: milliseconds of PyTorch's ways to sum slots.
    """

    def __init__(self, layer: Layer, rendezvous: Rendezvous, asked: Asked) -> None:
        self.layer, self.rendezvous, self.asked = layer, rendezvous, asked
        self.gpu = layer.x.is_cuda
        self.trains = layer.point.kind == "training"
        self.refused: dict[str, str] = {}
        self.configs: list[Config] = []
        self.times: dict[tuple[str, str], list[float]] = {}
        self.errors: dict[str, float] = {}
        self.sums: dict[str, Any] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.gpu else None
        self.timer = Timer(rendezvous, 2)
        self._leaves = [self._leaf(layer.x)] + [self._leaf(g) for g in layer.gates]
        pairs = zip(layer.weights.w_in, layer.weights.w_out, strict=True)
        self._weights = [(self._leaf(w_in), self._leaf(w_out)) for w_in, w_out in pairs]

    def _leaf(self, tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(self.trains)

    def operands(self, i: int) -> tuple[Tensor, ...]:
        """Return x, gates and weights of the i-th call."""
        return (self._leaves[0], self._leaves[1 + i], *self._weights[i % len(self._weights)])

    # ---- agreement of ranks

    def attempt(self, action: Callable[[], Any]) -> str:
        """Run an action that may fail; return why it failed on any rank, else an empty string."""
        beat()
        reason = ""
        try:
            action()
            if self.gpu:
                torch.cuda.synchronize()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:600]
        failed = [r for r, bad in enumerate(self.rendezvous.gather(float(bool(reason)))) if bad]
        return reason or (f"failed on ranks {failed}" if failed else "")

    def late(self, needed_s: float) -> bool:
        """Return whether rank 0 finds that less than this time is left."""
        return bool(self.rendezvous.gather(float(time.time() + needed_s > self.asked.end))[0])

    def revive(self) -> None:
        """Make ficco's group usable again if a call on it failed. Its graphs are dropped."""
        if not self.attempt(ficco.synchronize):
            return
        self.attempt(ficco.reset)
        for config in self.configs:
            if config.name in points.OURS and config.graph is not None:
                config.graph = config.last = None
                self.refused[f"{config.name} captured"] = "another call of ficco failed"

    # ---- one way

    def _made(self, name: str) -> Callable[..., Tensor]:
        layer = self.layer
        if name in points.OURS:
            if self.gpu and (why := ficco.fallback_reason()):
                raise RuntimeError(f"ficco would run plain torch.distributed: {why}")
            schedules = {"waves": ("two_waves", "push_sm"), "serial": ("serial", "serial")}
            if name in schedules:
                return by_ficco.way(True, schedules[name])
            return by_ficco.way(name == "auto_cap")
        if name in points.ALONE:
            return Alone(layer, name == "floor")
        if name == "symmetric":
            if not self.gpu:
                raise RuntimeError("PyTorch's symmetric memory needs GPUs")
            return Symmetric(layer)
        return by_nccl.all_to_all if name == "all_to_all" else by_nccl.all_gather

    def _why_not(self, name: str) -> str:
        if name in self.asked.skipped:
            return self.asked.skipped[name]
        if self.trains and name in points.NO_BACKWARD:
            return "forward only"
        if self.asked.sharing and name in points.NEED_NCCL:
            return "NCCL refuses ranks that share a GPU"
        return "no time was left" if self.late(NEEDED_S) else ""

    def ready(self, name: str) -> None:
        """Make a way, compare its results with float64, and capture it."""
        self.asked.tries(name)
        if reason := self._why_not(name):
            self.refused[name] = reason
            return
        made: list[Any] = []
        if reason := self.attempt(lambda: made.append(self._made(name))):
            self.refused[name] = reason
            return
        config = Config(name, partial(self._call, made[0]))
        for i in (0, 1):
            if reason := self._wrong(config, i):
                self.refused[name] = reason
                self.revive()
                return
        self.configs.append(config)
        if len(self.configs) == 1 and self.gpu:
            self._count_calls(config)
        if "captured" in self.regimes_of(name):
            self._capture(config)

    def _call(self, way: Callable[..., Tensor], i: int) -> Tensor:
        """Make the i-th call; with gradients of all operands if the point trains."""
        i %= points.SETS
        operands = self.operands(i)
        if not self.trains:
            with torch.no_grad():
                return way(self.layer, i, *operands)
        y = way(self.layer, i, *operands)
        self.grads = torch.autograd.grad(y, operands, self.layer.dy)
        return y.detach()

    def _wrong(self, config: Config, i: int) -> str:
        """Return why the i-th call's result is wrong; empty if it is right."""
        results: list[Tensor] = []
        reason = self.attempt(lambda: results.append(config.call(i)))
        if reason or config.name in points.ALONE:
            return reason
        return self._differs(config.name, results[0], i)

    def _differs(self, name: str, y: Tensor, i: int) -> str:
        tokens = self.layer.checked()
        wanted = self.layer.wanted(i)
        found = [y[tokens]]
        if self.trains:
            found += [self.grads[0][tokens], self.grads[1][tokens].reshape(1, -1)]
            wanted = (*wanted[:2], wanted[2].reshape(1, -1))
        gaps = [relative_error(a, b) for a, b in zip(found, wanted, strict=False)]
        if self.trains:
            first = [self.grads[2][0], self.grads[3][0]]  # of this rank's first expert
            pairs = zip(first, self.layer.weight_gradients(i), strict=True)
            gaps += [relative_error(a.reshape(1, -1), b.reshape(1, -1)) for a, b in pairs]
        worst = max(self.rendezvous.gather(max(gaps)))
        if math.isfinite(worst):
            self.errors[name] = max(self.errors.get(name, 0.0), float(f"{worst:.3g}"))
        return "" if worst < TOLERANCE[y.dtype] else f"wrong: relative error {worst:.3g}"

    def _count_calls(self, config: Config) -> None:
        """Find the number of calls of a run, from the time of a way that is ready."""
        mine: list[float] = []
        self.attempt(lambda: mine.extend(Timer(self.rendezvous, 2).run(config, "eager")))
        calls = calls_for(max(self.rendezvous.gather(mine[0] if mine else 0.0)))
        self.timer = Timer(self.rendezvous, calls)

    def regimes_of(self, name: str) -> list[str]:
        """Return the regimes in which a way is timed."""
        wanted = points.REGIMES[self.layer.point.kind]
        found = [each for each in self.asked.regimes if each in wanted]
        no_graph = name in points.NO_GRAPH or not self.gpu
        no_graph |= self.asked.sharing and name in points.OURS  # gloo moves their routing
        return [each for each in found if each != "captured" or not no_graph]

    def _capture(self, config: Config) -> None:
        """Capture a way, and compare a replay with other routings."""
        reason = self.attempt(lambda: self.timer.capture(config, self.pool))
        if not reason and config.name not in points.ALONE:
            reason = self._replay_differs(config)
        if reason:
            config.graph = config.last = None
            self.refused[f"{config.name} captured"] = reason
            self.revive()

    def _replay_differs(self, config: Config) -> str:
        self.layer.turn(TURN)

        def replay() -> None:
            config.last.fill_(torch.nan)
            config.graph.replay()

        last = self.timer.calls - 1
        reason = self.attempt(replay) or self._differs(config.name, config.last, last)
        self.layer.turn(0)
        return reason

    def choose_sums(self) -> None:
        """Find the fastest of PyTorch's ways to sum slots, with and without rows of no slot."""
        if not self.gpu:
            return
        way = Alone(self.layer, True)
        gates, agree = self.layer.gates[0], self.rendezvous.gather
        rows = way.rows[: len(way.padded[0].token)]
        every = torch.cat([self.layer.routing(0, r)[1] for r in range(self.layer.world)])
        with torch.no_grad():
            self.sums = {
                "own tokens": Sums.choose(way.returned, way.places, gates, agree),
                "all tokens": Sums.choose(rows, way.padded[0], every, agree),
                "chosen": list(Sums.chosen.values()),
            }

    # ---- rounds

    def rounds(self) -> None:
        """Time all ways round by round; the order of a round is equal on all ranks."""
        end = time.time() + self.asked.limit_s
        entries = [
            (config, regime) for config in self.configs for regime in self.regimes_of(config.name)
        ]
        for number in range(self.asked.rounds + 1):
            past = self.rendezvous.gather(float(time.time() > end))[0]
            if (past and number > LEAST_ROUNDS) or self.late(0.0):
                break
            self.layer.turn(number)
            random.Random(f"{self.layer.point.id} {number}").shuffle(entries)
            for config, regime in entries:
                self._time(config, regime, number)
        self.layer.turn(0)

    def _time(self, config: Config, regime: str, number: int) -> None:
        if config.name in self.refused or (regime == "captured" and config.graph is None):
            return
        self.asked.tries(config.name)
        found: list[float] = []
        reason = self.attempt(lambda: found.extend(self.timer.run(config, regime)))
        if reason:
            self.refused[config.name] = f"{regime}: {reason}"
            self.revive()
            return
        slowest = [max(self.rendezvous.gather(each)) for each in found]
        if number:  # the first round warms up
            self.times.setdefault((regime, config.name), []).append(statistics.fmean(slowest))

    def check_again(self) -> None:
        """Compare results with float64 once more, after the rounds."""
        for config in self.configs:
            if config.name in self.refused:
                continue
            reason = self._wrong(config, 1)
            if not reason and config.graph is not None and config.name not in points.ALONE:
                reason = self._replay_differs(config)
            if reason:
                self.refused[config.name] = f"after timing: {reason}"
                self.revive()


def measure(layer: Layer, rendezvous: Rendezvous, asked: Asked) -> dict[str, Any]:
    """Return a point's result, equal on all ranks. A collective call."""
    run, begin = Measuring(layer, rendezvous, asked), time.time()
    if reason := run.attempt(run.choose_sums):
        run.refused["sums of slots"] = reason
    for name in asked.ways:
        run.ready(name)
    prepared_s = time.time() - begin
    if run.gpu:
        run.rounds()
        run.check_again()
    ms: dict[str, dict[str, Any]] = {}
    for (regime, name), values in sorted(run.times.items()):
        if name not in run.refused and values:
            ms.setdefault(regime, {})[name] = figures(values)
    shape, point = layer.shape, layer.point
    return {
        "point": point.id, "shape": shape.name, "title": shape.title, "d": shape.d, "f": shape.f,
        "topk": shape.topk, "experts_of_rank": layer.e, "tokens": point.tokens,
        "routing": point.routing, "kind": point.kind, "capacity": layer.capacity,
        "imbalance": layer.imbalance, "layers": layer.weights.layers, "ms": ms,
        "calls_a_run": run.timer.calls, "checked": [config.name for config in run.configs],
        "errors": run.errors, "sums": run.sums, "refused": run.refused,
        "prepared_s": round(prepared_s, 1),
    }  # fmt: skip
