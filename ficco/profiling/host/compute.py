"""What ranks compute when all of them do, and what a step costs them besides."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ficco.compute import dtype_of, named
from ficco.plan import Step
from ficco.profiling.figures import gbps, slower
from ficco.profiling.grids import HOST_GEMMS, Shape
from ficco.profiling.host.rig import COLS, MOST_GEMM, ROWS, Rig, copy_step, gemm_step, lasted
from ficco.runtime.blas import single_threaded
from ficco.timeline import Span

__all__ = ["gemm_points", "memory_gbps", "step_costs"]

_TURNS, _TURN_US = 3, 10_000.0  # of which the median is taken
_STREAMED = 32 << 20  # bytes
_GEMMS, _SMALL = 20, (32, 32, 64)  # of a plan; m, n, k of those whose starts are timed

Run = Callable[[], object]


def gemm_points(world: int, dtype: str) -> list[tuple[int, int, int, float]]:
    """Return points (m, n, k, us): the slowest rank's time, all of them at once, a thread each."""
    return [(*shape, _gemm_us(world, shape, dtype)) for shape in HOST_GEMMS]


def _gemm_us(world: int, shape: Shape, dtype: str) -> float:
    m, n, k = shape
    compute, kind = named("numpy"), dtype_of(dtype)

    def made() -> Run:
        rng = np.random.default_rng(0)
        a, b = (rng.standard_normal(size).astype(kind) for size in ((m, k), (k, n)))
        c, handle = np.empty((m, n), kind), compute.handle(b, operand=True)
        return lambda: compute.gemm(a, handle, c, False, [])

    return _us(world, made)


def memory_gbps(world: int) -> float:
    """Return GB/s that a rank reads and writes, all of them at once, the slowest's."""

    def made() -> Run:
        source = np.ones(_STREAMED, np.uint8)
        target = np.empty_like(source)
        return lambda: np.copyto(target, source)

    return gbps(2 * _STREAMED, _us(world, made))


def _us(world: int, made: Callable[[], Run]) -> float:
    """Return how long a run lasts on the slowest rank; each has a thread that makes such runs."""
    together = threading.Barrier(world)

    def rank() -> float:
        run = made()
        run()
        begin = time.perf_counter()
        run()
        count = max(1, round(_TURN_US / (1e6 * (time.perf_counter() - begin) + 1)))
        times = []
        for _ in range(_TURNS):
            together.wait()
            begin = time.perf_counter()
            for _ in range(count):
                run()
            times.append(1e6 * (time.perf_counter() - begin) / count)
        return statistics.median(times)

    with single_threaded(), ThreadPoolExecutor(world) as threads:
        futures = [threads.submit(rank) for _ in range(world)]
        return max(future.result() for future in futures)


def step_costs(rig: Rig) -> dict[str, float]:
    """Return launch_us, gemm_beside_copies and copies_beside_gemm of a profile's costs.

    `launch_us` is what a compute step lasts more than its GEMM. The others compare plans that
    compute, that copy, and that do both.
    """

    def computes(rank: int, shape: Shape = MOST_GEMM) -> list[Step]:
        return [gemm_step(f"gemm{i}", rank, shape) for i in range(_GEMMS)]

    def copies(rank: int, count: int = 1) -> list[Step]:
        peer, box = (rank + 1) % rig.world, (0, ROWS, 0, COLS)
        return [copy_step(f"copy{i}", "push", rank, peer, box) for i in range(count)]

    small_us = _busy(rig.spans(lambda rank: computes(rank, _SMALL)), "gemm") / _GEMMS
    gemms_us = _busy(rig.spans(computes), "gemm")
    count = max(1, round(gemms_us / _busy(rig.spans(copies), "copy")))
    copies_us = _busy(rig.spans(lambda rank: copies(rank, count)), "copy")
    both = rig.spans(lambda rank: copies(rank, count) + computes(rank))
    return {
        "launch_us": max(0.0, small_us - _gemm_us(rig.world, _SMALL, "float32")),
        "gemm_beside_copies": slower(_busy(both, "gemm"), gemms_us),
        "copies_beside_gemm": slower(_busy(both, "copy"), copies_us),
    }


def _busy(runs: Sequence[Sequence[Span]], kind: str) -> float:
    """Return how long steps of a kind last together, of the median rank and run."""
    return statistics.median(
        statistics.median(lasted(span for span in spans if span.kind == kind)) for spans in runs
    )
