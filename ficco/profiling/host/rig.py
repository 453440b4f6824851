"""Hand-made plans on the host engine, and when their steps ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from ficco.compute import named
from ficco.machine import Machine
from ficco.plan import Buffer, Plan, Product, RankPlan, Region, Step
from ficco.problem import Problem
from ficco.profiling.grids import Shape
from ficco.runtime.local import LocalRuntime
from ficco.schedule import Schedule
from ficco.timeline import Span

__all__ = [
    "COLS",
    "MOST_GEMM",
    "ROWS",
    "ROW_BYTES",
    "Rig",
    "Steps",
    "copy_step",
    "gemm_step",
    "lasted",
]

ROWS, COLS = 2048, 2048  # of what is copied, and where it lands: 16 MiB of float32
ROW_BYTES = 4 * COLS
MOST_GEMM: Shape = (256, 256, 256)
RUNS = 7
_WARM = 2  # runs, one for each copy of the windows
Steps = Callable[[int], list[Step]]  # of a rank


def copy_step(name: str, lane: str, rank: int, peer: int, box: tuple[int, int, int, int]) -> Step:
    """Return a copy of a box (row0, row1, col0, col1) of `x` to the same place in a peer's window.

    With one rank the peer is the rank itself.
    """
    source, target = Region(rank, "x", *box), Region(peer, "landing", *box)
    return Step(name, lane, "copy", "dma", (source,), (target,))


def gemm_step(name: str, rank: int, shape: Shape) -> Step:
    """Return a GEMM in float32, no larger than MOST_GEMM."""
    m, n, k = shape
    a, b = Region(rank, "a", 0, m, 0, k), Region(rank, "b", 0, k, 0, n)
    product = Product(a, b, Region(rank, "c", 0, m, 0, n))
    return Step(name, "compute", "gemm", "sm", products=(product,))


def lasted(spans: Iterable[Span]) -> list[float]:
    """Return how long each rank took from its first start to its last end, in us."""
    by_rank: dict[int, list[Span]] = {}
    for span in spans:
        by_rank.setdefault(span.rank, []).append(span)
    return [
        max(s.end_us for s in mine) - min(s.start_us for s in mine) for mine in by_rank.values()
    ]


class Rig:
    """Ranks of this process that run plans of copies, words and GEMMs. A context.

    Args:
        world: number of ranks.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        m, n, k = MOST_GEMM
        self._buffers = (
            Buffer("x", "input", ROWS, COLS, "float32"),
            Buffer("a", "input", m, k, "float32"),
            Buffer("b", "weight", k, n, "float32"),
            Buffer("c", "output", m, n, "float32"),
            Buffer("landing", "window", ROWS, COLS, "float32", copies=2),
        )
        self._arrays: list[dict[str, Any]] = [
            {b.name: np.ones((b.rows, b.cols), np.float32) for b in self._buffers[:-1]}
            for _ in range(world)
        ]
        self._runtime = LocalRuntime(world, Machine.named("host"), named("numpy"), timeout_s=30.0)

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runtime.close()

    def spans(self, steps: Steps, runs: int = RUNS) -> list[Sequence[Span]]:
        """Run a plan some times; return what ran each time.

        Args:
            steps: of every rank; when they have run, words are as they were before.
            runs: how many times, after some that warm up.
        """
        problem = Problem.chunked("all_gather_matmul", self.world, self.world, self.world, 1)
        ranks = tuple(
            RankPlan(rank, self._buffers, tuple(steps(rank))) for rank in range(self.world)
        )
        plan = Plan(problem, Schedule.named("shard_p2p"), 1, ranks)
        found: list[Sequence[Span]] = []
        for _ in range(_WARM + runs):
            self._runtime.execute_plan(plan, self._arrays)
            found.append(self._runtime.timeline().spans)
        return found[_WARM:]
