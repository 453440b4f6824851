"""A rank's plan as rows of numbers for the native core, and the compute that Python runs.

All engines use the same rows; `Program` in ficco/_native.pyi describes them. Rows are in submission
order. Compute steps, which a library enqueues, divide the rows into segments.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ficco.dtypes import ELEMENT_BYTES
from ficco.errors import EngineError
from ficco.grouping import joined_copies
from ficco.machine import Link
from ficco.plan import Part, RankPlan, Region, Signal, Step, regions_of, signal_place, window_places

__all__ = ["COMPUTE", "INLINE", "Encoded", "Work", "encode", "encode_whole", "trace_rows"]

COMPUTE = ("gemm", "reduce", "bag")
INLINE = -1
_COPY, _RAISE, _WAIT, _CLEAR, _AFTER, _EXPECT, _TOLD = range(7)
_COLUMNS = 16  # of an op
_PADDING = (0,) * 11


class Row(NamedTuple):
    """A row of the trace: a step, a part of a gated step, or the waits or signals of a part."""

    name: str
    step: Step
    kind: str


def trace_rows(plan: RankPlan) -> list[Row]:
    """Return the rows of a plan's trace: its steps, then the extra rows of each step.

    The wait of a step for other steps is a row of its own. Each part has a row for its wait, its
    work and its signals.
    """
    rows = [Row(step.id, step, step.kind) for step in plan.steps]
    for step in plan.steps:
        if step.after:
            rows.append(Row(f"{step.id}.after", step, "wait"))
        for number in range(len(step.parts)):
            name = f"{step.id}[{number}]"
            rows.append(Row(f"{name}.wait", step, "wait"))
            rows.append(Row(name, step, step.kind))
            rows.append(Row(f"{name}.signal", step, "raise"))
    return rows


class Work(NamedTuple):
    """A compute step, or one part of a gated step, that Python runs between two segments."""

    row: int  # in the trace
    step: Step
    work: Step | Part
    mark: int  # step to mark as done afterwards, or -1


class Encoded(NamedTuple):
    """A plan in the form that an engine binds.

    Attributes:
        ops: [count, 16], sorted by segment.
        windows: [count, 4]: slot, rank, byte offset, pitch.
        slots: (rank, buffer) -> slot number.
        works: compute, one work between every two segments.
    """

    ops: npt.NDArray[np.int64]
    windows: npt.NDArray[np.int64]
    slots: dict[tuple[int, str], int]
    works: list[Work]

    @property
    def segments(self) -> int:
        """Number of segments."""
        return len(self.works) + 1


def encode(
    plan: RankPlan,
    lanes: dict[str, int],
    *,
    link: Link | None = None,
    at_once: bool = False,
    one_launch: bool = False,
    within: Collection[str] = (),
) -> Encoded:
    """Turn a plan into rows.

    Args:
        plan: the plan of one rank.
        lanes: number of each native lane; steps of other lanes run on the caller's lane.
        link: the paced link, whose latency goes into rows of copies; None: links are not paced.
        at_once: whether native lanes get all their rows in the first segment. Such lanes are
            threads, which wait for their dependencies by themselves. Streams get their rows in the
            plan's order.
        one_launch: whether a gated step is one work, which waits for and raises its signals by
            itself, and whose buffers have slots. Otherwise each part is a work, between rows that
            wait and raise.
        within: ids of steps that such work performs; they get no rows.

    Raises:
        EngineError: compute on another rank's buffers.
    """
    encoder = _Encoder(plan, lanes, link)
    encoder.at_once, encoder.one_launch, encoder.within = at_once, one_launch, within
    return encoder.encoded()


def encode_whole(plan: RankPlan) -> Encoded:
    """Encode a plan that one kernel runs: one work, and the signals that the kernel waits for.

    The work takes the trace row of the first compute step. The kernel handles mailboxes itself.
    """
    encoder = _Encoder(plan, {}, None)
    for buffer in plan.buffers:
        if buffer.role == "mailbox":
            continue
        encoder.slots[plan.rank, buffer.name] = len(encoder.slots)
    first = next((i for i, step in enumerate(plan.steps) if step.kind in COMPUTE), 0)
    for index, step in enumerate(plan.steps):
        if step.kind == "wait":
            encoder.expect(index, step.signals, _TOLD)
    encoder.works.append(Work(first, plan.steps[first], plan.steps[first], -1))
    return encoder.finished()


class _Encoder:
    """Builder of flat rows; tracks the segment that rows of the caller's lane go to.

    Rows are built for every new shape, so this is written for speed: one tuple per row.
    """

    def __init__(self, plan: RankPlan, lanes: dict[str, int], link: Link | None) -> None:
        self.plan, self.lanes, self.link = plan, lanes, link
        self.item = {buffer.name: ELEMENT_BYTES[buffer.dtype] for buffer in plan.buffers}
        self.at_once = self.one_launch = False
        self.within: Collection[str] = ()
        self.ahead: list[int] = []  # rows that are submitted at once
        self.rows: list[int] = []  # the other rows, in order
        self.segment = 0
        self.slots: dict[tuple[int, str], int] = {}
        self.works: list[Work] = []

    def encoded(self) -> Encoded:
        """Return all rows."""
        steps = self.plan.steps
        index_of = {step.id: i for i, step in enumerate(steps)}
        dependencies = {index_of[other] for step in steps for other in step.after}
        extra = len(steps)  # the next trace row that is not a step
        for i, step in enumerate(steps):
            if step.id in self.within:
                continue
            lane = self.lanes.get(step.lane, INLINE)
            for other in step.after:
                rows, segment = self._place(lane)
                rows += (segment, lane, _AFTER, extra, index_of[other], *_PADDING)
            extra += bool(step.after)
            mark = i if i in dependencies else -1
            if step.parts and self.one_launch:
                self._launch(i, step, extra, mark)
                extra += 3 * len(step.parts)
            elif step.parts:
                for number, part in enumerate(step.parts):
                    self._signals(lane, _WAIT, extra, part.waits)
                    last = number == len(step.parts) - 1
                    self._work(Work(extra + 1, step, part, mark if last else -1))
                    self._signals(lane, _RAISE, extra + 2, part.raises)
                    extra += 3
            elif step.kind in COMPUTE:
                if self.one_launch and step.kind == "reduce":
                    self._name(regions_of(step))
                self._work(Work(i, step, step, mark))
            elif step.kind == "copy":
                for source, target in zip(step.reads, step.writes, strict=True):
                    self._copy(lane, i, source, target)
            elif step.kind == "local_copy":
                for source, target in joined_copies(step.reads, step.writes):
                    self._copy(lane, i, source, target)
            else:
                kind = {"raise": _RAISE, "wait": _WAIT, "clear": _CLEAR}[step.kind]
                self._signals(lane, kind, i, step.signals)
        return self.finished()

    def finished(self) -> Encoded:
        """Return all rows added so far."""
        flat = np.frombuffer(array("q", self.ahead + self.rows), np.int64)
        return Encoded(flat.reshape(-1, _COLUMNS), self._windows(), self.slots, self.works)

    def expect(self, index: int, signals: tuple[Signal, ...], kind: int = _EXPECT) -> None:
        """Record that the next work waits for signals by itself."""
        self._signals(INLINE, kind, index, signals)

    def _place(self, lane: int) -> tuple[list[int], int]:
        """Return the rows that a lane's ops go to, and their segment."""
        if self.at_once and lane != INLINE:
            return self.ahead, 0
        return self.rows, self.segment

    def _windows(self) -> npt.NDArray[np.int64]:
        places, _ = window_places(self.plan.buffers)
        pitch = {b.name: b.cols * self.item[b.name] for b in self.plan.buffers}
        windows = [
            (slot, rank, places[name], pitch[name])
            for (rank, name), slot in self.slots.items()
            if name in places
        ]
        return np.array(windows, np.int64).reshape(-1, 4)

    def _launch(self, index: int, step: Step, extra: int, mark: int) -> None:
        """Add a gated step as one work, and the signals that it waits for, without duplicates."""
        known: set[Signal] = set()
        for number, part in enumerate(step.parts):
            self._name(regions_of(part))
            fresh = tuple([signal for signal in part.waits if signal not in known])
            known.update(fresh)
            self.expect(extra + 3 * number, fresh)
        self._work(Work(index, step, step, mark))

    def _name(self, regions: list[Region]) -> None:
        """Assign slots to the buffers of regions, for kernels that native code launches."""
        for region in regions:
            self.slots.setdefault((region.rank, region.buffer), len(self.slots))

    def _work(self, work: Work) -> None:
        parts = work.step.parts if work.work is work.step else ()
        for region in (r for item in (work.work, *parts) for r in regions_of(item)):
            if region.rank != self.plan.rank:
                raise EngineError(
                    f"step {work.step.id!r} computes on {region}; engines compute in their own "
                    "rank's buffers, so push the result by a copy step"
                )
        self.works.append(work)
        self.segment += 1

    def _signals(self, lane: int, kind: int, index: int, signals: tuple[Signal, ...]) -> None:
        rows, segment = self._place(lane)
        value = 0 if kind == _CLEAR else 1
        for signal in signals:
            digest = 1 if signal.name == "entered" and kind != _CLEAR else 0
            rows += (
                segment, lane, kind, index, signal.rank, signal_place(signal), value, digest,
                0, 0, 0, 0, 0, 0, 0, signal.copy,
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
