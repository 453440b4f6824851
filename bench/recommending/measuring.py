"""Check and time the ways of dlrm.py on one rank, in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from record import spread

from ficco.operators.problem import chunk_sizes
from recommending.model import Mlps, infer, train
from recommending.shapes import Shape, draw
from recommending.ways import WAYS, ByFicco, ByTorch, Way

__all__ = ["ROUNDS", "measure"]

ROUNDS, MOST_STEPS, TURN_MS = 15, 50, 20.0
LARGE = 2.0**20  # a rate
WARM = 10  # calls, after which auto may take kernels that must be compiled
INFERRED = ("torch_dense", "ficco_dense")  # gradients do not matter there
Call = Callable[[], Any]


class Setup:
    """A shape's model, tables and batch on this rank, and the ways that share them."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.dtype = getattr(torch, shape.dtype)
        self.shape, self.device = shape, device
        self.counts = list(chunk_sizes(shape.tables, world))
        torch.manual_seed(0)
        self.mlps = Mlps(shape, device)
        torch.manual_seed(rank)
        self.tables = [
            torch.empty(shape.rows, shape.dim, device=device, dtype=self.dtype)
            .normal_(std=0.1)
            .requires_grad_()
            for _ in range(self.counts[rank])
        ]
        self.batch = draw(shape, self.counts, rank, device)
        self.rate = torch.zeros((), device=device)
        self.ways: dict[str, Way] = {}
        for name in WAYS:
            by, kind = name.split("_")
            made = ByTorch if by == "torch" else ByFicco
            self.ways[name] = made(
                shape, self.counts, rank, self.tables, self.batch, kind, self.rate
            )

    def calls(self) -> dict[str, dict[str, Call]]:
        """Return what is timed, by part and way."""
        return {
            "training": {name: partial(self.step, name) for name in WAYS},
            "embeddings": {name: self._embeddings(name) for name in WAYS},
            "inference": {name: partial(self._inference, name) for name in INFERRED},
        }

    def step(self, name: str) -> torch.Tensor:
        """Make a training step; return the scores."""
        return train(self.mlps, self.ways[name], self.batch, 0.0)

    def _inference(self, name: str) -> torch.Tensor:
        with torch.no_grad():
            return infer(self.mlps, self.ways[name], self.batch)

    def _embeddings(self, name: str) -> Call:
        """Return a call that pools and updates the tables alone."""
        way = self.ways[name]
        counts = [self.shape.tables] if name.startswith("ficco") else self.counts
        dys = [
            torch.randn(way.own, count, self.shape.dim, device=self.device, dtype=self.dtype)
            for count in counts
        ]

        def call() -> None:
            way.clear()
            torch.autograd.backward(way.end(way.begin()), dys)
            way.step()

        return call

    def errors(self, name: str) -> dict[str, float]:
        """Return how far scores and the first table's gradient are from those of torch_dense."""
        wanted = self._results("torch_dense")
        found = self._results(name)
        return {what: _relative(found[what], wanted[what]) for what in found}

    def _results(self, name: str) -> dict[str, torch.Tensor]:
        """Return the scores of a step and the first table's gradient, for fused SGD its update."""
        if name == "ficco_adagrad":
            return {"scores": self.step(name).float()}
        table = self.tables[0]
        if name != "ficco_fused":
            scores = self.step(name)
            assert table.grad is not None
            return {"scores": scores.float(), "gradient": table.grad.to_dense().float()}
        before = [each.detach().clone() for each in self.tables]
        self.rate.fill_(LARGE)  # beside such updates the tables' own bits do not matter
        scores = self.step(name)
        self.rate.zero_()
        update = (before[0].float() - table.detach().float()) / LARGE
        with torch.no_grad():
            for each, old in zip(self.tables, before, strict=True):
                each.copy_(old)
        return {"scores": scores.float(), "gradient": update}


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the distance by 2-norms, the largest of all ranks."""
    gap = torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted)
    gap = gap.double().reshape(1)
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    return float(f"{gap.item():.2e}")


def _tried(make: Call) -> tuple[Any, dict[str, str]]:
    """Return what a function makes, or the reasons for which some rank fails."""
    reason, made = "", None
    try:
        made = make()
    except Exception as error:  # of PyTorch or ficco: the way is left out
        reason = f"{type(error).__name__}: {error}"[:300]
    said: list[Any] = [""] * dist.get_world_size()
    dist.all_gather_object(said, reason)
    reasons = {str(rank): each for rank, each in enumerate(said) if each}
    return (None if reasons else made), reasons


def _warmed(call: Call, device: torch.device) -> Call:
    """Return a call that has run often enough."""
    for _ in range(1 if device.type == "cpu" else WARM):
        call()
    return call


def _graph_of(call: Call) -> Call:
    """Return the replay of a graph of a call that has run."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def _ms(call: Call, times: int, device: torch.device) -> float:
    """Return ms of a call that is made so often back to back, of the slowest rank."""
    dist.barrier()
    if device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(times):
            call()
        found = 1e3 * (time.perf_counter() - begin) / times
    else:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begun.record()
        for _ in range(times):
            call()
        ended.record()
        ended.synchronize()
        found = begun.elapsed_time(ended) / times
    slowest = torch.tensor([found], device=device, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def _timed(calls: dict[str, Call], device: torch.device, rounds: int) -> dict[str, Any]:
    """Return ms of each call, in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    counts = {}
    for name, call in calls.items():
        once = max(_ms(call, 2, device), 1e-3)
        counts[name] = min(MOST_STEPS, max(2, round(TURN_MS / once)))
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_ms(call, counts[name], device))
    return {name: spread(found) for name, found in times.items()}


def measure(shape: Shape, device: torch.device, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the figures of a shape: errors, times by part, mode and way, reasons of failures."""
    setup = Setup(shape, device)
    errors: dict[str, Any] = {}
    times: dict[str, Any] = {}
    refused: dict[str, dict[str, str]] = {}
    for name in WAYS:
        found, refused[f"errors, {name}"] = _tried(partial(setup.errors, name))
        if found is not None:
            errors[name] = found
    for part, calls in setup.calls().items():
        ready: dict[str, dict[str, Call]] = {"eager": {}, "captured": {}}
        for name in [name for name in calls if name in errors]:
            what = f"{part}, {name}"
            warmed, refused[what] = _tried(partial(_warmed, calls[name], device))
            if warmed is None:
                continue
            ready["eager"][name] = warmed
            if device.type == "cuda":
                what = f"{part}, {name}, captured"
                graph, refused[what] = _tried(partial(_graph_of, warmed))
                if graph is not None:
                    ready["captured"][name] = graph
        for mode, each in ready.items():
            if each:
                times[f"{part}, {mode}"] = _timed(each, device, rounds)
        ready.clear()
        for table in setup.tables:
            table.grad = None
        gc.collect()
    return {
        "case": shape.name, **shape._asdict(), "errors": errors, "ms": times,
        "refused": {what: reasons for what, reasons in refused.items() if reasons},
        **_summed_up(times),
    }  # fmt: skip


def _summed_up(ms: dict[str, Any]) -> dict[str, Any]:
    """Return, by part and mode, the best of PyTorch's times over ficco's; and the tables' share.

    The share is the time of pooling, exchanges and updates alone, over that of the step, of
    PyTorch's fastest way.
    """
    gains, shares = {}, {}
    for key, times in ms.items():
        own, other = _best(times, "ficco"), _best(times, "torch")
        if own is not None and other is not None:
            gains[key] = round(times[other]["median"] / times[own]["median"], 3)
        part, mode = key.split(", ")
        alone = ms.get(f"embeddings, {mode}", {})
        if part == "training" and other in alone:
            shares[mode] = round(alone[other]["median"] / times[other]["median"], 3)
    return {"torch_over_ficco": gains, "embedding_share": shares}


def _best(times: dict[str, Any], by: str) -> str | None:
    names = [name for name in times if name.startswith(by) and name != "ficco_adagrad"]
    return min(names, key=lambda name: times[name]["median"], default=None)
