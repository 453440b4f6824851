"""Finishing: the steps after arrivals, chunk by chunk or all at once, and the end of the call.

Arrivals that are moved leave the window by local copies, several arrivals at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ficco.lowering.attachments import row_regions
from ficco.lowering.handshake import closed
from ficco.lowering.producing import COMPUTE
from ficco.lowering.scattering import Chunk, Cut, Made
from ficco.plan import Region, Signal, Step


class Batch(NamedTuple):
    """Arrivals that are finished together: their signals and (peer, chunk) pairs."""

    name: str
    signals: tuple[Signal, ...]
    arrived: tuple[tuple[int, int], ...]


def batches(cut: Cut, per_chunk: bool) -> list[Batch]:
    """Return arrivals in batches: all at once, by step or peer, or one by one.

    With `per_chunk` false, arrivals of one step stay together: a sum needs those of all peers.
    """
    schedule, rank = cut.schedule, cut.rank
    groups: dict[str, list[tuple[int, int]]] = {}
    for peer, j in cut.arrivals():
        if schedule.compute == "whole" or (schedule.order == "by_peer" and not per_chunk):
            key = "all"
        elif per_chunk and schedule.compute in ("per_chunk", "gated"):
            key = f"{j}of{peer}"
        else:
            key = f"peer{peer}" if schedule.order == "by_peer" else f"step{j}"
        groups.setdefault(key, []).append((peer, j))
    return [
        Batch(key, tuple([Signal(rank, "data", peer, j) for peer, j in pairs]), tuple(pairs))
        for key, pairs in groups.items()
    ]


def await_data(batch: Batch) -> Step:
    """Return the step that waits for a batch."""
    return Step(f"wait.{batch.name}", COMPUTE, "wait", "none", signals=batch.signals)


def reduce(cut: Cut, batch: Batch, out_row: int, rows_added: Sequence[str]) -> list[Step]:
    """Return the steps that add a batch over all ranks, in rank order, into y0 from `out_row`."""
    rank, rows, width = cut.rank, cut.blocks.own.rows, cut.widths[cut.rank]
    whole = Chunk(0, rows, 0, width)
    chunk = whole if batch.name == "all" else cut.received(*batch.arrived[0])
    terms = []
    for source in range(cut.world):
        if source == rank:
            terms.append(cut.piece(rank, chunk).target)
        else:
            terms.append(cut.arrived(source, chunk))
    terms += row_regions(rank, rows_added, chunk.col0, chunk.col1)
    target = Region(rank, "y0", out_row + chunk.row0, out_row + chunk.row1, chunk.col0, chunk.col1)
    return [Step(f"sum.{batch.name}", COMPUTE, "reduce", "sm", tuple(terms), (target,))]


def move(cut: Cut, arrived: Sequence[Batch], item_bytes: int) -> list[Step]:
    """Return the waits for batches, and their copies from the window to the same box of y0."""
    arrivals = []
    for batch in arrived:
        reads = tuple([cut.arrived(peer, cut.received(peer, j)) for peer, j in batch.arrived])
        writes = tuple([Region(cut.rank, "y0", *region[2:6]) for region in reads])
        arrivals.append(Arrival(batch.name, batch.signals, reads, writes))
    return moves(arrivals, COMPUTE, item_bytes)


def close(
    cut: Cut, made: Made, data: Sequence[Signal], beside: str = "", reading: Sequence[str] = ()
) -> None:
    """Add the end of the call: every peer has entered, and no step reads the window any more.

    `beside`: a lane besides compute that waits and reads. `reading`: lanes that only read.
    """
    peers, signals = list(made.lanes), [*data, *made.launch_signals]
    made.steps = closed(cut.rank, peers, signals, made.steps, COMPUTE, beside, reading)


SMALL_BYTES = 512 << 10  # the last copy moves up to this much: 0.3 us on an H200 after its start
GROWTH = 4  # the largest ratio of one copy's bytes to those of the next copy


class Arrival(NamedTuple):
    """Data that arrives together: its signals, its regions in the window, and their targets."""

    name: str
    signals: tuple[Signal, ...]
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]


def moves(arrivals: Sequence[Arrival], lane: str, item_bytes: int) -> list[Step]:
    """Return the waits for arrivals, in order of arrival, and their local copies."""
    sizes = [item_bytes * sum([region.area for region in arrival.reads]) for arrival in arrivals]
    steps = []
    for begin, end in _groups(sizes):
        group, name = arrivals[begin:end], arrivals[end - 1].name
        signals = tuple([signal for arrival in group for signal in arrival.signals])
        reads = tuple([region for arrival in group for region in arrival.reads])
        writes = tuple([region for arrival in group for region in arrival.writes])
        steps += [
            Step(f"wait.{name}", lane, "wait", "none", signals=signals),
            Step(f"move.{name}", lane, "local_copy", "sm", reads, writes),
        ]
    return steps


def _groups(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (begin, end) of the arrivals that each copy moves; `sizes` are in bytes."""
    groups: list[tuple[int, int]] = []
    end, most = len(sizes), SMALL_BYTES
    while end:
        begin, total = end - 1, sizes[end - 1]
        while begin and total + sizes[begin - 1] <= most:
            begin -= 1
            total += sizes[begin]
        groups.append((begin, end))
        end, most = begin, GROWTH * max(total, SMALL_BYTES)
    return groups[::-1]
