"""Compute rates of ranks with one core each, and the overhead of compute steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np

from ficco.compute import dtype_of
from ficco.plan import Step
from ficco.profiling.figures import gbps, slower
from ficco.profiling.grids import Shape
from ficco.profiling.host.rig import COLS, MOST_GEMM, Made, Rig, copy_step, gemm_step, lasted
from ficco.timeline import Span

__all__ = ["gemm_points", "memory_gbps", "step_costs"]

_SMALL: Shape = (32, 32, 64)  # m, n, k of the GEMMs for launch_us

_COPIES = ("copy", "local_copy")  # kinds of spans: with one rank, copies are local


def gemm_points(rig: Rig, dtype: str) -> list[tuple[int, int, int, float]]:
    """Return points (m, n, k, us): the slowest rank's time, while all active ranks compute."""
    shapes = rig.extent.shapes
    times = rig.least_us([_gemm(rig, shape, dtype) for shape in shapes])
    return [(*shape, us) for shape, us in zip(shapes, times, strict=False)]


def _gemm(rig: Rig, shape: Shape, dtype: str) -> Made:
    m, n, k = shape
    compute, kind = rig.compute, dtype_of(dtype)

    def made() -> Callable[[], object]:
        rng = np.random.default_rng(0)
        a, b = (rng.standard_normal(size).astype(kind) for size in ((m, k), (k, n)))
        a, b, c = (
            compute.handle(a), compute.handle(b, operand=True),
            compute.handle(np.empty((m, n), kind)),
        )  # fmt: skip
        return lambda: compute.gemm(a, b, c, False, [])

    return made


def memory_gbps(rig: Rig) -> float:
    """Return GB/s that a rank reads and writes in a sum, while all active ranks do the same."""
    rows, compute = rig.extent.rows, rig.compute

    def made() -> Callable[[], object]:
        one, other, total = (compute.handle(np.ones((rows, COLS), np.float32)) for _ in range(3))
        return lambda: compute.reduce([one, other], total)

    return gbps(3 * rows * COLS * 4, rig.least_us([made])[0])


def step_costs(rig: Rig) -> dict[str, float]:
    """Return launch_us, gemm_beside_copies and copies_beside_gemm of a profile's costs.

    `launch_us` is the time of a compute step beyond its GEMM. The other two compare plans that
    compute, that copy, and that do both. Only as many ranks run as have two cores each, because a
    rank that copies and computes uses two cores. With one core, nothing runs side by side.
    """
    number, active = rig.extent.gemms, min(rig.world, rig.cores // 2)

    def gemm_steps(rank: int, shape: Shape = MOST_GEMM) -> list[Step]:
        return [gemm_step(f"gemm{i}", rank, shape) for i in range(number)]

    def copy_steps(rank: int, count: int = 1) -> list[Step]:
        peer, box = (rank + 1) % rig.world, (0, rig.extent.rows, 0, COLS)
        return [copy_step(f"copy{i}", "push", rank, peer, box) for i in range(count)]

    small = rig.spans(lambda rank: gemm_steps(rank, _SMALL) if rank < rig.active else [])
    small_us = _busy(small, "gemm") / number
    costs = {"launch_us": max(0.0, small_us - rig.least_us([_gemm(rig, _SMALL, "float32")])[0])}
    if not active:
        return costs
    gemms_us = _busy(rig.spans(lambda rank: gemm_steps(rank) if rank < active else []), "gemm")
    once_us = _busy(rig.spans(lambda rank: copy_steps(rank) if rank < active else []), *_COPIES)
    count = max(1, round(gemms_us / once_us))
    copies_us = _busy(
        rig.spans(lambda rank: copy_steps(rank, count) if rank < active else []), *_COPIES
    )
    beside = rig.spans(
        lambda rank: copy_steps(rank, count) + gemm_steps(rank) if rank < active else []
    )
    return costs | {
        "gemm_beside_copies": slower(_busy(beside, "gemm"), gemms_us),
        "copies_beside_gemm": slower(_busy(beside, *_COPIES), copies_us),
    }


def _busy(runs: Sequence[Sequence[Span]], *kinds: str) -> float:
    """Return the total time of spans of these kinds, on the median rank, in the fastest run."""
    return min(
        statistics.median(lasted(span for span in spans if span.kind in kinds)) for spans in runs
    )
