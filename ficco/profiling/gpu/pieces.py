"""The slowdown of a GEMM that runs in pieces (decomposition-induced loss)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ficco.compute.torch_device import TorchDeviceCompute
from ficco.measuring.clock import captured
from ficco.profiling.gpu.operands import Pool
from ficco.profiling.gpu.ranks import Ranks
from ficco.profiling.grids import Shape

__all__ = ["measure"]

_SHAPES: tuple[Shape, ...] = ((10240, 3584, 8192), (10240, 8192, 2048), (40960, 2048, 8192))
_ROWS, _COLUMNS = (2, 4, 8, 16, 32), (2, 4, 8)
_CALLS, _ROUNDS = 4, 3

Run = Callable[[], None]


def measure(ranks: Ranks, shapes: Sequence[Shape] = _SHAPES) -> list[dict[str, Any]]:
    """Return a profile's `pieces`: the median rank's time of all pieces over that of the whole.

    Pieces of rows write parts of one output; slices of columns accumulate in float32.
    """
    entries = []
    for shape in shapes:
        m, n, k = shape
        ratios = iter(_ratios(ranks, shape))
        for cut, numbers in (("rows", _ROWS), ("columns", _COLUMNS)):
            points = [(number, next(ratios)) for number in numbers]
            entries.append({"cut": cut, "m": m, "n": n, "k": k, "ratio": points})
    return entries


def _ratios(ranks: Ranks, shape: Shape) -> list[float]:
    """Time the whole and all cuts in turn, round by round; return the cuts' ratios."""
    m, n, k = shape
    inputs = Pool(2 * (m * k + n * k), ranks.device)
    y = torch.empty((m, n), dtype=torch.bfloat16, device=ranks.device)
    total = torch.empty((m, n), dtype=torch.float32, device=ranks.device)
    compute = TorchDeviceCompute()

    def whole() -> None:
        torch.mm(inputs.take(m, k), inputs.take(n, k).t(), out=y)

    def rows(number: int) -> Run:
        def run() -> None:
            x, w, step = inputs.take(m, k), inputs.take(n, k).t(), m // number
            for first in range(0, m, step):
                compute.gemm(x[first : first + step], w, y[first : first + step], False, [])

        return run

    def columns(number: int) -> Run:
        def run() -> None:
            x, w, step = inputs.take(m, k), inputs.take(n, k).t(), k // number
            for first in range(0, k, step):
                last = first + step
                compute.gemm(x[:, first:last], w[first:last], total, first > 0, [])

        return run

    runs = [whole, *map(rows, _ROWS), *map(columns, _COLUMNS)]
    graphs = [_graph(run) for run in runs]
    ranks.meet()
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(_ROUNDS):
        for graph, graph_times in zip(graphs, times, strict=True):
            graph_times.append(ranks.replayed(graph, _CALLS, together=False))
    whole_us, *cut_us = map(statistics.median, times)
    return ranks.middles([us / whole_us for us in cut_us])


def _graph(run: Run) -> Any:
    run()

    def several() -> None:
        for _ in range(_CALLS):
            run()

    return captured(several)
