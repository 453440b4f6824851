"""The slowdown of a gated GEMM against the library's, when all its signals are raised."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from ficco.compute import GatedOperands
from ficco.compute.torch_kernels import TorchKernels
from ficco.curves import GATED_DEPTH
from ficco.measuring.clock import captured
from ficco.profiling.figures import slower
from ficco.profiling.gpu.operands import Pool
from ficco.profiling.gpu.ranks import Ranks
from ficco.profiling.grids import Shape
from ficco.tables import GatedPart

__all__ = ["measure"]

_SHAPES: tuple[Shape, ...] = (
    (10240, 3584, GATED_DEPTH), (10240, 7168, GATED_DEPTH), (5120, 2560, GATED_DEPTH),
)  # fmt: skip
_CALLS, _ROUNDS, _PATIENCE_S = 4, 5, 1.0


def measure(ranks: Ranks, shapes: Sequence[Shape] = _SHAPES) -> float:
    """Return the geometric mean over shapes of the median rank's ratio; 1 or more.

    The gated GEMM has one part of the rank's own rows, and one part per peer that waits for a word
    that is already set.
    """
    return slower(statistics.geometric_mean([_ratio(ranks, shape) for shape in shapes]), 1.0)


def _ratio(ranks: Ranks, shape: Shape) -> float:
    m, n, k = shape
    inputs = Pool(2 * (2 * m * k + n * k), ranks.device)
    y = torch.empty((m, n), dtype=torch.bfloat16, device=ranks.device)
    words = torch.ones((1, ranks.world), dtype=torch.int32, device=ranks.device)
    rows = m // ranks.world
    parts = [GatedPart("own", 0, 0, rows)]
    parts += [GatedPart("window", i * rows, i * rows, rows, i) for i in range(1, ranks.world)]
    gated, stop = TorchKernels(), torch.zeros(1, dtype=torch.int32, device=ranks.device)
    prepared = gated.prepare(parts, n, k, "bfloat16", _PATIENCE_S, stop.data_ptr)

    def library() -> None:
        torch.mm(inputs.take(m, k), inputs.take(n, k).t(), out=y)

    def launch() -> None:
        own, window = inputs.take(rows, k), inputs.take(m, k)
        gated.arm(
            prepared,
            GatedOperands(own, window, inputs.take(n, k).t(), None, y, None, None, words, 0),
        )()

    runs: list[Callable[[], None]] = [library, launch]
    graphs = []
    for run in runs:
        run()

        def several(run: Callable[[], None] = run) -> None:
            for _ in range(_CALLS):
                run()

        graphs.append(captured(several))
    times: list[list[float]] = [[], []]
    for _ in range(_ROUNDS):
        for graph, graph_times in zip(graphs, times, strict=True):
            graph_times.append(ranks.replayed(graph, _CALLS, together=False))
    ratio = statistics.median(times[1]) / statistics.median(times[0])
    return ranks.middles([ratio])[0]
