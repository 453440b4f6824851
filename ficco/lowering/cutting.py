"""Cutting a shard into chunks, and the order in which chunks leave and arrive; makes no steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ficco.core.errors import ScheduleError
from ficco.operators import registry
from ficco.plan.schedule import Schedule
from ficco.plan.tables import peers_of

# Pieces begin at multiples of these numbers of rows or columns. A GEMM whose operands are not
# aligned to 16 bytes takes several times as long. A partial tile takes as long as a whole tile.
_UNITS = (64, 8, 1)
_MIN_UNITS = 8  # units in the smallest chunk, so that chunks stay about equal


def check_implemented(op: str, schedule: Schedule) -> None:
    """Reject a schedule that no lowering implements, or that is not resolved.

    Raises:
        ScheduleError: the message names the nearest schedule that works.
    """
    flow = registry.get(op).flow
    if schedule.moves and flow.pools:
        raise ScheduleError(
            f"{op}: transport='sm' with compute='whole' is only for operators with GEMMs; the "
            "nearest that works is compute='gated'"
        )
    if schedule.shots != "two" and not flow.shares:
        stores = f", as in {registry.get(op).schedules[0]}" if schedule.transport == "sm" else ""
        raise ScheduleError(
            f"{op}: shots={schedule.shots!r} is only for {_ops(lambda f: f.shares)}; what works is "
            f"shots='two'{stores}"
        )
    if schedule.sums != "apart" and not flow.sums:
        raise ScheduleError(
            f"{op}: sums={schedule.sums!r} is only for {_ops(lambda f: f.sums)}; what works is "
            "sums='apart'"
        )
    if schedule.sums == "within" and schedule.compute != "gated":
        raise ScheduleError(
            f"sums='within' with compute={schedule.compute!r}: only tiles of a gated launch add "
            "arrivals to their sums; the nearest that works is sums='apart', or compute='gated'"
        )
    for axis in ("route", "order", "transport"):
        if getattr(schedule, axis) == "machine":
            raise ScheduleError(
                f"{axis}='machine' has no value yet; call Schedule.resolve(world, machine) first"
            )
    if schedule.taper == "edge":
        _check_edge(op, schedule)
    schedule.chunks  # noqa: B018 - raises where grain is not resolved


def is_edged(flow: registry.Flow) -> bool:
    """Return whether taper="edge" applies to an operator.

    It needs one turn for each peer's block, and blocks that are not added up chunk by chunk.
    """
    return not (flow.shares or flow.pools)


def _ops(fits: Callable[[registry.Flow], bool]) -> str:
    """Return the names of all operators whose flow `fits`, for a message."""
    return " and ".join(name for name in registry.names() if fits(registry.get(name).flow))


def _check_edge(op: str, schedule: Schedule) -> None:
    if not is_edged(registry.get(op).flow):
        raise ScheduleError(
            f"{op}: taper='edge' is only for {_ops(is_edged)}; what works is taper='none'"
        )
    if schedule.transport == "sm":
        raise ScheduleError(
            "taper='edge' with transport='sm': its kernels store tile by tile; what works is "
            "taper='none'"
        )
    needed = {"route": "rotation", "order": "by_peer", "cut": "rows", "sums": "apart"}
    for axis, value in needed.items():
        if getattr(schedule, axis) != value:
            raise ScheduleError(
                f"taper='edge' with {axis}={getattr(schedule, axis)!r}: it cuts only the "
                f"shard that travels first or last; the nearest that works is {axis}={value!r}, or "
                "taper='none'"
            )


@lru_cache(maxsize=4096)
def chunk_bounds(size: int, chunks: int, taper: str) -> tuple[int, ...]:
    """Return the start of each chunk of a shard, followed by the size.

    Chunks begin at multiples of 64, 8 or 1: the largest of these that keeps them about equal. With
    fewer rows than chunks, some chunks are empty. A taper shrinks the first two (head) or last two
    (tail) chunks to a quarter and a half of the others.
    """
    weights = [
        min(
            1 << min(j, 2) if taper in ("head", "both") else 4,
            1 << min(chunks - 1 - j, 2) if taper in ("tail", "both") else 4,
        )
        for j in range(chunks)
    ]
    total, done, bounds = sum(weights), 0, [0]
    smallest = size * min(weights) // total
    unit = next((unit for unit in _UNITS if smallest >= unit * _MIN_UNITS), 1)
    for weight in weights[:-1]:
        done += weight
        bounds.append((size * done // total + unit // 2) // unit * unit)
    return (*bounds, size)


def row_bounds(rows: int, chunks: int) -> list[int]:
    """Return the first row of each chunk of a rank's rows, and their number; some may be empty."""
    return [rows * number // chunks for number in range(chunks + 1)]


def turn_bounds(size: int, schedule: Schedule, turn: int, edge: int, taper: str) -> tuple[int, ...]:
    """Return the chunk bounds of the shard that travels in `turn`; in turn 0 the shard stays.

    With taper="edge" the shard of turn `edge` has the schedule's chunks, tapered by `taper`. For
    other shards, all chunks but the first are empty.
    """
    chunks = schedule.chunks
    if schedule.taper != "edge":
        return chunk_bounds(size, chunks, schedule.taper)
    return chunk_bounds(size, chunks, taper) if turn == edge else (0, *(size,) * chunks)


def departures(schedule: Schedule, world: int, rank: int) -> list[tuple[int, int]]:
    """Return (peer, chunk) in the order in which `rank` submits its pushes."""
    return _in_order(schedule, peers_of(rank, world))


def arrivals(schedule: Schedule, world: int, rank: int) -> list[tuple[int, int]]:
    """Return (peer, chunk) in the order in which chunks reach `rank` if no rank is late.

    In turn t rank r pushes to r+t, so data from r-1 arrives first at r.
    """
    peers = [(rank - turn) % world for turn in range(1, world)]
    return _in_order(schedule, peers)


def _in_order(schedule: Schedule, peers: list[int]) -> list[tuple[int, int]]:
    chunks = range(schedule.chunks)
    if schedule.order == "by_step":
        return [(peer, chunk) for chunk in chunks for peer in peers]
    return [(peer, chunk) for peer in peers for chunk in chunks]
