"""Cutting a shard into chunks, and the order in which chunks leave and arrive. No steps here."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ficco import registry
from ficco.errors import ScheduleError
from ficco.schedule import Schedule

__all__ = ["arrivals", "check_implemented", "chunk_bounds", "departures", "is_edged", "turn_bounds"]

# Rows or columns that pieces begin at multiples of. A GEMM whose operands do not begin at multiples
# of 16 bytes takes several times as long, and one of part of a tile as long as one of a whole tile.
_UNITS = (64, 8, 1)
_MANY = 8  # units that the smallest chunk has, so that chunks are about equal still


def check_implemented(op: str, schedule: Schedule) -> None:
    """Refuse what no lowering implements, or what is not resolved yet.

    Raises:
        ScheduleError: it names the nearest that works.
    """
    if schedule.transport == "collective":
        raise ScheduleError(
            f"{op}: transport='collective' is torch.distributed's, whole and without a plan; the "
            "nearest that has one is transport='dma'"
        )
    flow = registry.get(op).flow
    if schedule.transport == "sm" and not flow.one_kernel:
        raise ScheduleError(
            f"{op}: transport='sm' is implemented for {_those(lambda f: f.one_kernel != '')} "
            "alone; the nearest that works is transport='dma'"
        )
    if schedule.shots != "two" and not flow.shares:
        stores = ", as gather_sm has it" if schedule.transport == "sm" else ""
        raise ScheduleError(
            f"{op}: shots={schedule.shots!r} is of {_those(lambda f: f.shares)}; what works is "
            f"shots='two'{stores}"
        )
    if schedule.sums != "apart" and not flow.sums:
        raise ScheduleError(
            f"{op}: sums={schedule.sums!r} is of {_those(lambda f: f.sums)}; what works is "
            "sums='apart'"
        )
    if schedule.sums == "within" and schedule.compute != "gated":
        raise ScheduleError(
            f"sums='within' with compute={schedule.compute!r}: only tiles of a gated launch add up "
            "what comes meanwhile; the nearest that works is sums='apart', or compute='gated'"
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
    """Whether taper="edge" cuts an operator's blocks.

    Those of each peer arrive in a turn of their own, and are not added up chunk by chunk.
    """
    return not (flow.shares or flow.pools)


def _those(fits: Callable[[registry.Flow], bool]) -> str:
    """Return the names of all operators whose flow fits, for a message."""
    return " and ".join(name for name in registry.names() if fits(registry.get(name).flow))


def _check_edge(op: str, schedule: Schedule) -> None:
    if not is_edged(registry.get(op).flow):
        raise ScheduleError(
            f"{op}: taper='edge' is of {_those(is_edged)}; what works is taper='none'"
        )
    if schedule.transport == "sm":
        raise ScheduleError(
            "taper='edge' with transport='sm', whose kernels store tile by tile; what works is "
            "taper='none'"
        )
    needed = {"route": "rotation", "order": "by_peer", "cut": "rows", "sums": "apart"}
    for axis, value in needed.items():
        if getattr(schedule, axis) != value:
            raise ScheduleError(
                f"taper='edge' with {axis}={getattr(schedule, axis)!r}: it cuts the one shard that "
                f"travels first or last; the nearest that works is {axis}={value!r}, or "
                "taper='none'"
            )


@lru_cache(maxsize=4096)
def chunk_bounds(size: int, chunks: int, taper: str) -> tuple[int, ...]:
    """Return where each chunk of a shard begins, and the size as one last entry.

    Chunks are as equal as multiples of 64, 8 or 1 allow, whichever is the greatest that leaves them
    about equal; with fewer rows than chunks some are empty. A taper makes the first (head) or last
    (tail) two chunks a quarter and half as large as the others.
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
    unit = next((unit for unit in _UNITS if smallest >= unit * _MANY), 1)
    for weight in weights[:-1]:
        done += weight
        bounds.append((size * done // total + unit // 2) // unit * unit)
    return (*bounds, size)


def turn_bounds(size: int, schedule: Schedule, turn: int, edge: int, taper: str) -> tuple[int, ...]:
    """Return the same of the shard that travels in a turn; turn 0: which stays.

    With taper="edge" that of turn `edge` has the schedule's chunks, tapered as said, and of others
    all chunks but the first are empty.
    """
    chunks = schedule.chunks
    if schedule.taper != "edge":
        return chunk_bounds(size, chunks, schedule.taper)
    return chunk_bounds(size, chunks, taper) if turn == edge else (0, *(size,) * chunks)


def departures(schedule: Schedule, world: int, rank: int) -> list[tuple[int, int]]:
    """Return (peer, chunk) in the order in which `rank` submits its pushes."""
    peers = [(rank + turn) % world for turn in range(1, world)]
    return _in_order(schedule, peers)


def arrivals(schedule: Schedule, world: int, rank: int) -> list[tuple[int, int]]:
    """Return (peer, chunk) in the order in which chunks reach `rank` when nobody is late.

    In turn t rank r pushes to r+t, so r hears from r-1 first.
    """
    peers = [(rank - turn) % world for turn in range(1, world)]
    return _in_order(schedule, peers)


def _in_order(schedule: Schedule, peers: list[int]) -> list[tuple[int, int]]:
    chunks = range(schedule.chunks)
    if schedule.order == "by_step":
        return [(peer, chunk) for chunk in chunks for peer in peers]
    return [(peer, chunk) for peer in peers for chunk in chunks]
