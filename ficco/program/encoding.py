"""A program as rows of numbers for the native core, and the launches between its segments.

All engines use the same rows; `Program` in ficco/_native.pyi describes them. Rows are in submission
order. Launches, which a library or native code enqueues, divide the rows into segments.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ficco.core.dtypes import ELEMENT_BYTES
from ficco.core.errors import EngineError
from ficco.core.machine import Link
from ficco.plan import Region, Signal, signal_place, window_places
from ficco.program import (
    Copy,
    Entry,
    Exchange,
    Experts,
    Gated,
    Launch,
    OneKernel,
    Program,
    SignalWrite,
    Wait,
    kind_of,
    operands_of,
)

INLINE = -1
_COPY, _RAISE, _WAIT, _CLEAR, _AFTER, _EXPECT, _MISSED = range(7)
_HOW = {"thread": 0, "stream": 0, "copy": 1, "kernel": 2}
_COLUMNS = 16  # of a row
_PADDING = (0,) * 11
_ENTERED, _FREE = [signal_place(Signal(0, name, 0)) for name in ("entered", "free")]


class Row(NamedTuple):
    """A row of the trace: an entry, or a wait of an entry for others or for signals."""

    name: str
    entry: Entry
    kind: str


class Segment(NamedTuple):
    """A launch, which ends a segment.

    Attributes:
        row: of the launch in the trace.
        launch: the entry.
        mark: the entry to mark as done afterwards, or -1.
    """

    row: int
    launch: Launch
    mark: int


class Encoded(NamedTuple):
    """A program in the form that an engine binds.

    Attributes:
        ops: [count, 16], sorted by segment.
        windows: [count, 4]: slot, rank, byte offset, pitch.
        slots: (rank, buffer) -> slot number.
        row_count: number of rows of the trace; see `trace_rows`.
        leading: launches before the first segment.
        segments: launches, one between every two segments.
    """

    ops: npt.NDArray[np.int64]
    windows: npt.NDArray[np.int64]
    slots: dict[tuple[int, str], int]
    row_count: int
    leading: list[Segment]
    segments: list[Segment]

    @property
    def segment_count(self) -> int:
        """Number of segments of rows."""
        return len(self.segments) + 1


def trace_rows(program: Program) -> list[Row]:
    """Return the rows of a program's trace: its entries, then the further waits of each entry."""
    rows = [Row(entry.id, entry, kind_of(entry)) for entry in program.entries]
    for entry in program.entries:
        if entry.after:
            rows.append(Row(f"{entry.id}.after", entry, "wait"))
        if isinstance(entry, Launch):
            rows += [Row(name, entry, "wait") for name, _ in _awaited(entry)]
    return rows


def _native_lanes(program: Program) -> dict[str, int]:
    """Number the lanes that get a stream or a thread; lanes with launches are the caller's lane."""
    if program.target.in_order:
        return {}
    computing = {
        entry.lane
        for entry in program.entries
        if isinstance(entry, Launch) or (isinstance(entry, Wait) and entry.how == "kernel")
    }
    lanes: dict[str, int] = {}
    for entry in program.entries:
        if entry.lane not in computing:
            lanes.setdefault(entry.lane, len(lanes))
    return lanes


def encode(program: Program, link: Link | None = None) -> Encoded:
    """Turn a program into rows.

    Args:
        program: of one rank.
        link: the paced link, whose latency goes into rows of copies; None: links are not paced.

    Raises:
        EngineError: compute on another rank's buffers.
    """
    return _Encoder(program, link).encoded()


def _awaited(launch: Launch) -> list[tuple[str, list[int]]]:
    """Return the waits of a kernel by name, with the places of signals that no earlier one has.

    A kernel reports the place of a signal that it misses, so a place belongs to one wait.
    """
    waits: list[tuple[str, list[int]]] = []
    if isinstance(launch.work, OneKernel):
        for name, signals in launch.work.waits:
            waits.append((name, [signal_place(signal) for signal in signals]))
    elif isinstance(launch.work, Gated):
        for number, part in enumerate(launch.work.parts):
            places = [part.word, *[term.word for term in part.terms if term is not None]]
            waits.append((f"{launch.id}[{number}].wait", [at for at in places if at >= 0]))
    known: set[int] = set()
    awaited = []
    for name, places in waits:
        fresh = [place for place in places if place not in known]
        if fresh:
            known.update(fresh)
            awaited.append((name, fresh))
    return awaited


class _Encoder:
    """Builder of flat rows; tracks the segment that rows of the caller's lane go to.

    Rows are built for every new shape, so this is written for speed: one tuple per row.
    """

    def __init__(self, program: Program, link: Link | None) -> None:
        self.program, self.lanes, self.link = program, _native_lanes(program), link
        self.item = {buffer.name: ELEMENT_BYTES[buffer.dtype] for buffer in program.buffers}
        self.ahead: list[int] = []  # rows of thread lanes, submitted at the start of a call
        self.rows: list[int] = []  # the other rows, in order
        self.segment = 0
        self.slots: dict[tuple[int, str], int] = {}
        self.leading: list[Segment] = []
        self.segments: list[Segment] = []

    def encoded(self) -> Encoded:
        """Return all rows."""
        entries = self.program.entries
        index_of = {entry.id: i for i, entry in enumerate(entries)}
        awaited = {name for entry in entries if entry.after for name in entry.after}
        last = entries[-1] if entries else None  # a kernel behind products that it reads
        whole = isinstance(last, Launch) and isinstance(last.work, OneKernel)
        extra = len(entries)  # the next trace row that is no entry
        for i, entry in enumerate(entries):
            lane = self.lanes.get(entry.lane, INLINE)
            if entry.after:
                for name in entry.after:
                    rows, segment = self._place(lane)
                    rows += (segment, lane, _AFTER, extra, index_of[name], *_PADDING)
                extra += 1
            if isinstance(entry, Copy):
                self._copy(lane, i, entry.source, entry.target)
            elif isinstance(entry, SignalWrite):
                how = _HOW[entry.how]
                if entry.clears:
                    self._signals(lane, _CLEAR, i, entry.clears, how)
                if entry.raises:
                    self._signals(lane, _RAISE, i, entry.raises, how)
            elif isinstance(entry, Wait):
                self._signals(lane, _WAIT, i, entry.signals, _HOW[entry.how])
            elif isinstance(entry, Exchange):
                raise EngineError(f"entry {entry.id!r}: the engines run no collectives")
            else:
                mark = i if entry.id in awaited else -1
                extra += self._launch(Segment(i, entry, mark), extra, whole)
        flat = np.frombuffer(array("q", self.ahead + self.rows), np.int64)
        return Encoded(
            flat.reshape(-1, _COLUMNS), self._windows(), self.slots, extra, self.leading,
            self.segments,
        )  # fmt: skip

    def _launch(self, segment: Segment, extra: int, whole: bool) -> int:
        """Add a launch and the signals that it awaits; return the number of its waits."""
        work, rank = segment.launch.work, self.program.rank
        if isinstance(work, OneKernel):
            for buffer in self.program.buffers:
                if buffer.role != "mailbox":
                    self.slots.setdefault((rank, buffer.name), len(self.slots))
        elif whole:  # it runs before all segments, and only its row in the trace is needed
            self.leading.append(segment)
            return 0
        for region in operands_of(work):
            if region.rank != rank:
                if isinstance(work, Experts):  # its kernel has the addresses of all windows
                    continue
                raise EngineError(
                    f"step {segment.launch.id!r} computes on {region}; engines compute in their "
                    "own rank's buffers, so push the result by a copy step"
                )
            if segment.launch.by == "native":
                self.slots.setdefault((rank, region.buffer), len(self.slots))
        waits = _awaited(segment.launch)
        reports = isinstance(work, OneKernel) or self.program.target.gathers
        kind = _MISSED if reports else _EXPECT
        for number, (_, places) in enumerate(waits):
            for place in places:
                digest = int(_ENTERED <= place < _FREE)
                self.rows += (
                    self.segment, INLINE, kind, extra + number, rank, place, 1, digest,
                    0, 0, 0, 0, 0, 0, 0, 0,
                )  # fmt: skip
        self.segments.append(segment)
        self.segment += 1
        return len(waits)

    def _place(self, lane: int) -> tuple[list[int], int]:
        """Return the rows that a lane's ops go to, and their segment."""
        if lane != INLINE and self.program.target.threads:
            return self.ahead, 0
        return self.rows, self.segment

    def _windows(self) -> npt.NDArray[np.int64]:
        buffers = self.program.buffers
        places, _ = window_places(buffers)
        pitch = {b.name: b.cols * self.item[b.name] for b in buffers}
        windows = [
            (slot, rank, places[name], pitch[name])
            for (rank, name), slot in self.slots.items()
            if name in places
        ]
        return np.array(windows, np.int64).reshape(-1, 4)

    def _signals(
        self, lane: int, kind: int, index: int, signals: tuple[Signal, ...], how: int = 0
    ) -> None:
        rows, segment = self._place(lane)
        value = 0 if kind == _CLEAR else 1
        for signal in signals:
            digest = 1 if signal.name == "entered" and kind != _CLEAR else 0
            rows += (
                segment, lane, kind, index, signal.rank, signal_place(signal), value, digest,
                how, 0, 0, 0, 0, 0, 0, signal.copy,
            )  # fmt: skip

    def _copy(self, lane: int, index: int, source: Region, target: Region) -> None:
        item, link, slots = self.item[source.buffer], self.link, self.slots
        rank, there = source.rank, target.rank
        latency_ns = 0
        if rank == there:
            from_rank = to_rank = -1
        else:
            from_rank, to_rank = rank, there
            if link is not None:
                size = source.area * item
                latency_ns = round(1e3 * (link.transfer_us(size) - size / (link.peak_gbps * 1e3)))
        rows, segment = self._place(lane)
        rows += (
            segment, lane, _COPY, index,
            slots.setdefault((rank, source.buffer), len(slots)), source.row0, source.col0 * item,
            slots.setdefault((there, target.buffer), len(slots)), target.row0, target.col0 * item,
            source.row1 - source.row0, (source.col1 - source.col0) * item,
            from_rank, to_rank, latency_ns, source.copy | target.copy << 1,
        )  # fmt: skip
