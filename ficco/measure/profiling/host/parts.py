"""The parts of a host engine's profile: rates of compute and of copies, costs of signals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ficco.engine.compute import dtype_of
from ficco.measure.profiling.figures import Points, gbps, latency_and_rates, net_rates, slower
from ficco.measure.profiling.grids import Shape
from ficco.measure.profiling.host.rig import (
    COLS,
    MOST_GEMM,
    ROW_BYTES,
    Made,
    Rig,
    Steps,
    copy_step,
    gemm_step,
    lasted,
)
from ficco.plan import Signal, Step
from ficco.plan.timeline import Span

# ---- compute

_SMALL: Shape = (32, 32, 64)  # m, n, k of the GEMMs for launch_us


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
    small_us = _busy(small, _is_gemm) / number
    costs = {"launch_us": max(0.0, small_us - rig.least_us([_gemm(rig, _SMALL, "float32")])[0])}
    if not active:
        return costs
    gemms_us = _busy(rig.spans(lambda rank: gemm_steps(rank) if rank < active else []), _is_gemm)
    once_us = _busy(rig.spans(lambda rank: copy_steps(rank) if rank < active else []), _is_copy)
    count = max(1, round(gemms_us / once_us))
    copies_us = _busy(
        rig.spans(lambda rank: copy_steps(rank, count) if rank < active else []), _is_copy
    )
    beside = rig.spans(
        lambda rank: copy_steps(rank, count) + gemm_steps(rank) if rank < active else []
    )
    return costs | {
        "gemm_beside_copies": slower(_busy(beside, _is_gemm), gemms_us),
        "copies_beside_gemm": slower(_busy(beside, _is_copy), copies_us),
    }


def _busy(runs: Sequence[Sequence[Span]], counts: Callable[[Span], bool]) -> float:
    """Return the total time of some spans, on the median rank, in the fastest run."""
    return min(statistics.median(lasted(filter(counts, spans))) for spans in runs)


def _is_step(names: set[str], span: Span) -> bool:
    return span.step in names


def _is_gemm(span: Span) -> bool:
    return span.kind == "gemm"


def _is_copy(span: Span) -> bool:
    return span.kind in ("copy", "local_copy")  # with one rank, copies are local


# ---- copies

_ROW_COUNTS = (1, 4, 16, 64, 256, 1024, 2048)  # rows of a copy: 8 KiB to 16 MiB
_LEAST, _MOST = 2, 64  # least and most copies of a run
_WIDTHS = (64, 256, 1024)  # columns of a box; 256 B .. 4 KiB, half a row


def link(rig: Rig) -> dict[str, Any]:
    """Return a profile's link within a node, measured on the slowest of the ranks that copy.

    The number of concurrent copies is the number of cores. Ranks share one memory, so all copies of
    a rank share its rate, as they share a port.
    """
    latency, rates = latency_and_rates(_by_size(rig))
    found: dict[str, Any] = {"scope": "node", "per": "port", "latency_us": latency, "gbps": rates}
    if rig.world > 1:
        most = min(rig.world - 1, max(rig.cores // rig.active, 1))
        found["out_gbps"] = [_to_several(rig, peers) for peers in range(1, most + 1)]
        most = min(rig.world - 1, rig.cores)
        found["in_gbps"] = [_from_several(rig, peers) for peers in range(1, most + 1)]
    found["row_gbps"] = net_rates(_by_width(rig), latency)
    return found


def _by_size(rig: Rig) -> Points:
    """Return (bytes, us of one copy), for consecutive copies on one lane."""
    points = []
    most = rig.extent.rows
    for rows in (count for count in _ROW_COUNTS if count <= most):
        count = max(_LEAST, min(_MOST, 2 * most // rows))

        def steps(rank: int, rows: int = rows, count: int = count) -> list[Step]:
            peer, places = (rank + 1) % rig.world, most // rows
            return [
                _push(f"copy{i}", "push", rank, peer, (i % places * rows, rows))
                for i in range(count if rank < rig.active else 0)
            ]

        points.append((rows * ROW_BYTES, _us(rig, steps) / count))
    return points


def _to_several(rig: Rig, peers: int) -> tuple[int, float]:
    """Return (peers, total GB/s): every rank copies to `peers` peers, with one lane per peer."""
    rows = rig.extent.rows // rig.world

    def steps(rank: int) -> list[Step]:
        return [
            _push(f"copy{i}to{distance}", f"push{distance}", rank, (rank + distance) % rig.world,
                  (rank * rows, rows))
            for i in range(_LEAST if rank < rig.active else 0)
            for distance in range(1, peers + 1)
        ]  # fmt: skip

    return peers, gbps(peers * _LEAST * rows * ROW_BYTES, _us(rig, steps))


def _from_several(rig: Rig, peers: int) -> tuple[int, float]:
    """Return (peers, total GB/s): `peers` ranks copy to rank 0 at once."""
    rows = rig.extent.rows // rig.world

    def steps(rank: int) -> list[Step]:
        count = _LEAST if 1 <= rank <= peers else 0
        return [_push(f"copy{i}", "push", rank, 0, (rank * rows, rows)) for i in range(count)]

    return peers, gbps(peers * _LEAST * rows * ROW_BYTES, _us(rig, steps))


def _by_width(rig: Rig) -> list[tuple[int, int, float]]:
    """Return (bytes of a row, bytes of a box, us): copies of some columns of wider rows."""
    points = []
    for width in _WIDTHS:

        def steps(rank: int, width: int = width) -> list[Step]:
            peer, box = (rank + 1) % rig.world, (0, rig.extent.rows, 0, width)
            count = _LEAST if rank < rig.active else 0
            return [copy_step(f"copy{i}", "push", rank, peer, box) for i in range(count)]

        row_bytes = width * ROW_BYTES // COLS
        points.append((row_bytes, row_bytes * rig.extent.rows, _us(rig, steps) / _LEAST))
    return points


def _push(name: str, lane: str, rank: int, peer: int, rows: tuple[int, int]) -> Step:
    """Return a copy of whole rows; `rows`: (first, count)."""
    first, count = rows
    return copy_step(name, lane, rank, peer, (first, first + count, 0, COLS))


def _us(rig: Rig, steps: Steps) -> float:
    """Return the time of all copies of a plan, on the slowest rank, in the fastest run."""
    return min(max(lasted(spans)) for spans in rig.spans(steps))


# ---- signals

_WORDS, _ROUNDS = 200, 100
_LANE = "signals"


def signal_costs(rig: Rig) -> dict[str, float]:
    """Return signal_us, raise_us, wait_us and clear_us of a profile's costs.

    Each is the cost of one of many signals in a step, on the median rank of the fastest run, while
    all active ranks run. `raise_us` is half of the round trip of a signal between rank 0 and rank
    1, without the costs of raising and waiting. A single rank has no signals.
    """
    if rig.world == 1:
        return dict.fromkeys(("signal_us", "raise_us", "wait_us", "clear_us"), 0.0)
    runs = rig.spans(lambda rank: _steps(rig.active, rank) if rank < rig.active else [])
    names = {"signal_us": "raise", "wait_us": "wait", "clear_us": "clear"}
    costs = {
        field: _busy(runs, partial(_is_step, {name})) / _WORDS for field, name in names.items()
    }
    rounds = {f"{kind}{i}" for kind in ("send", "wait") for i in range(_ROUNDS)}
    half = _busy(rig.spans(_to_and_fro), partial(_is_step, rounds)) / (2 * _ROUNDS)
    costs["raise_us"] = max(0.0, half - costs["signal_us"] - costs["wait_us"])
    return costs


def _steps(world: int, rank: int) -> list[Step]:
    """Return steps that raise the next rank's signals and wait until this rank's are raised.

    A second wait on the raised signals is timed; then they are cleared.
    """
    next_rank, previous_rank = (rank + 1) % world, (rank - 1) % world
    raised = tuple(Signal(next_rank, "data", rank, i) for i in range(_WORDS))
    awaited = tuple(Signal(rank, "data", previous_rank, i) for i in range(_WORDS))
    kinds = {"raise": "raise", "first": "wait", "wait": "wait", "clear": "clear"}
    return [
        Step(name, _LANE, kind, "none", signals=raised if kind == "raise" else awaited)
        for name, kind in kinds.items()
    ]


def _to_and_fro(rank: int) -> list[Step]:
    if rank > 1:
        return []
    steps = []
    for i in range(_ROUNDS):
        send = Step(
            f"send{i}", _LANE, "raise", "none", signals=(Signal(1 - rank, "data", rank, i),)
        )
        wait = Step(f"wait{i}", _LANE, "wait", "none", signals=(Signal(rank, "data", 1 - rank, i),))
        steps += [send, wait] if rank == 0 else [wait, send]
    back = tuple(Signal(rank, "data", 1 - rank, i) for i in range(_ROUNDS))
    return [*steps, Step("clear", _LANE, "clear", "none", signals=back)]
