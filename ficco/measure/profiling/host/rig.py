"""Ranks for measurements: they run hand-made plans on the host engine, and plain functions.

A measurement never uses more threads than there are cores. Its figures are those of a core that
does nothing else; the simulator models the loss of ranks that share cores. The fastest of several
runs counts, because other load of the machine only lengthens runs.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

import ficco
from ficco.core.machine import Machine
from ficco.engine.compute import Compute, named
from ficco.measure import host_us
from ficco.measure.profiling.grids import HOST_GEMMS, QUICK_GEMMS, Shape
from ficco.operators import oracle
from ficco.operators.problem import Problem
from ficco.plan import Buffer, Plan, Product, RankPlan, Region, Step
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import Span
from ficco.runtime.engine import single_threaded
from ficco.runtime.node_runtime import NodeRuntime

COLS = 2048  # columns of copies: rows of 8 KiB in float32
ROW_BYTES = 4 * COLS
MOST_GEMM: Shape = (256, 256, 256)
_WARM = 2  # warm-up runs, one for each copy of the windows
Steps = Callable[[int], list[Step]]  # returns the steps of a rank
Made = Callable[[], Callable[[], object]]  # returns the function to time


def copy_step(name: str, lane: str, rank: int, peer: int, box: tuple[int, int, int, int]) -> Step:
    """Return a copy of a box (row0, row1, col0, col1) of `x` to the same place in a peer's window.

    With one rank the peer is the rank itself.
    """
    source, target = Region(rank, "x", *box), Region(peer, "recv", *box)
    return Step(name, lane, "copy", "dma", (source,), (target,))


def gemm_step(name: str, rank: int, shape: Shape) -> Step:
    """Return a GEMM in float32, no larger than MOST_GEMM."""
    m, n, k = shape
    a, b = Region(rank, "a", 0, m, 0, k), Region(rank, "b", 0, k, 0, n)
    product = Product(a, b, Region(rank, "c", 0, m, 0, n))
    return Step(name, "compute", "gemm", "sm", products=(product,))


def lasted(spans: Iterable[Span]) -> list[float]:
    """Return each rank's time from its first start to its last end, in us."""
    by_rank: dict[int, list[Span]] = {}
    for span in spans:
        by_rank.setdefault(span.rank, []).append(span)
    return [
        max(s.end_us for s in rank_spans) - min(s.start_us for s in rank_spans)
        for rank_spans in by_rank.values()
    ]


def own_us(makes: Sequence[Made], extent: Extent, cpu: Callable[[], float]) -> list[float]:
    """Return each run's least time on this rank, in us; see `Rig.least_us`.

    Args:
        makes: each returns a function to time.
        extent: the number of turns, and the time limit.
        cpu: returns the CPU seconds of this rank. They count if they are less than the elapsed
            time, because then other threads used the core.
    """
    times_us: list[float] = []
    start_s = time.perf_counter()
    for make in makes:
        if times_us and time.perf_counter() - start_s > extent.budget_s:
            break
        run = make()
        run()
        begin = time.perf_counter()
        run()
        count = max(1, round(extent.turn_us / (1e6 * (time.perf_counter() - begin) + 1)))
        turns = []
        for _ in range(extent.turns):
            begin, cpu_begin = time.perf_counter(), cpu()
            for _ in range(count):
                run()
            turns.append(min(time.perf_counter() - begin, cpu() - cpu_begin) / count)
        times_us.append(1e6 * min(turns))
    return times_us


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return the largest time of each run that all ranks timed."""
    return [max(times) for times in zip(*ranks, strict=False)]


class Rig(ABC):
    """Ranks that run plans of copies, signals and GEMMs. A context manager.

    Args:
        world: number of ranks.
        cores: number of cores that the ranks share.
        compute: the library for GEMMs.
        extent: the extent of the measurement.
        kind: "threads" or "processes".

    Attributes:
        active: number of ranks with one core each.
    """

    def __init__(self, world: int, cores: int, compute: Compute, extent: Extent, kind: str) -> None:
        self.world, self.cores, self.compute, self.extent = world, cores, compute, extent
        self.kind = kind
        self.active = min(world, cores)
        m, n, k = MOST_GEMM
        self._buffers = (
            Buffer("x", "input", extent.rows, COLS, "float32"),
            Buffer("a", "input", m, k, "float32"),
            Buffer("b", "weight", k, n, "float32"),
            Buffer("c", "output", m, n, "float32"),
            Buffer("recv", "window", extent.rows, COLS, "float32", copies=2),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def spans(self, steps: Steps) -> list[Sequence[Span]]:
        """Run a plan several times; return the spans of all ranks for each run.

        Args:
            steps: returns a rank's steps; they must leave all signals as they were.
        """
        problem = Problem.chunked("all_gather_matmul", self.world, self.world, self.world, 1)
        ranks = tuple(
            RankPlan(rank, self._buffers, tuple(steps(rank))) for rank in range(self.world)
        )
        plan = Plan(problem, Schedule.named("shard_p2p"), 1, ranks)
        return self._run(plan, _WARM + self.extent.runs)[_WARM:]

    _runtime: Any  # of this process's ranks
    _arrays: Any  # of plans

    def _run(self, plan: Plan, runs: int) -> list[Sequence[Span]]:
        """Run a plan `runs` times; return the spans of this process's ranks."""
        spans: list[Sequence[Span]] = []
        for _ in range(runs):
            self._runtime.execute_plan(plan, self._arrays)
            spans.append(self._runtime.timeline().spans)
        return spans

    @abstractmethod
    def least_us(self, makes: Sequence[Made]) -> list[float]:
        """Return each run's time on the slowest active rank, while all active ranks run it, in us.

        Args:
            makes: each returns a function to time. Those that remain when the extent's time limit
                is reached are left out, except for the first.
        """

    @abstractmethod
    def probe_us(self, problem: Problem, schedule: Schedule) -> float:
        """Return the time of one of many consecutive calls on the slowest rank, in us."""

    def close(self) -> None:
        """End the ranks."""
        self._runtime.close()

    def arrays(self) -> dict[str, Any]:
        """Return a rank's arrays for the plans."""
        return {b.name: np.ones((b.rows, b.cols), np.float32) for b in self._buffers[:-1]}


class Extent(NamedTuple):
    """Sizes and repetitions of a measurement.

    Attributes:
        rows: rows of 8 KiB in the largest copy.
        runs: runs of a plan; the fastest counts.
        turns: turns of a GEMM; the fastest counts.
        turn_us: intended time of a turn.
        shapes: shapes of GEMMs.
        budget_s: time after which no more shapes of a dtype are started; the largest are left out.
        gemms: GEMMs of one plan in which GEMMs run beside copies.
        probes: turns of whole calls.
    """

    rows: int
    runs: int
    turns: int
    turn_us: float
    shapes: tuple[Shape, ...]
    budget_s: float
    gemms: int
    probes: int


THOROUGH = Extent(2048, 9, 5, 10_000.0, HOST_GEMMS, 6.0, 20, 12)
_QUICK_ROWS, _MOST_ROWS = 4096, 1024  # rows of all ranks, most rows of one


def quick(world: int) -> Extent:
    """Return the extent of a measurement before a first call; with more ranks, fewer rows each."""
    rows = max(64, min(_MOST_ROWS, _QUICK_ROWS // world))
    return Extent(rows, 5, 4, 1_000.0, QUICK_GEMMS, 0.1, 5, 8)


# ---- ranks that are threads

CALLS = 5  # calls of a turn


class ThreadRig(Rig):
    """See `Rig`. NumPy runs the GEMMs."""

    def __init__(self, world: int, cores: int, extent: Extent) -> None:
        super().__init__(world, cores, named("numpy"), extent, "threads")
        self._arrays = [self.arrays() for _ in range(world)]
        self._runtime = NodeRuntime(world, Machine.named("host"), self.compute, timeout_s=30.0)

    def least_us(self, makes: Sequence[Made]) -> list[float]:
        """See `Rig`."""
        barrier = threading.Barrier(self.active)

        def rank() -> list[float]:
            barrier.wait()
            return own_us(makes, self.extent, time.thread_time)

        with single_threaded(), ThreadPoolExecutor(self.active) as threads:
            futures = [threads.submit(rank) for _ in range(self.active)]
            return slowest([future.result() for future in futures])

    def probe_us(self, problem: Problem, schedule: Schedule) -> float:
        """See `Rig`."""
        inputs = oracle.inputs(problem, 0)
        with ficco.Node(self.world, machine="host") as node:
            run = partial(node.run, problem, inputs, schedule=schedule)
            return min(host_us(run, CALLS) for _ in range(self.extent.probes))
