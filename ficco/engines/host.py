"""The host engine: one rank's plan on native threads and a compute library.

Lanes without compute are native threads, and get all their work in one call when the plan starts.
Lanes with compute run on the calling thread, in submission order (which every verified plan
survives); what stands there between two compute steps is one native call.

    calling thread   submit 0 | gemm | submit 1 | gemm | ... | finish
    lane threads       copy, signal, copy, signal ...

With `in_order` there are no lane threads: everything runs on the calling thread in submission
order, as on a single shared hardware queue.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ficco.compute import Compute, dtype_of
from ficco.errors import EngineError
from ficco.machine import Machine
from ficco.plan import (
    ELEMENT_BYTES,
    Part,
    Product,
    RankPlan,
    Region,
    Step,
    Word,
    regions_of,
    window_places,
    word_place,
)
from ficco.timeline import Span

try:
    from ficco import _native
except ImportError as missing:
    raise EngineError(
        f"the native core cannot be loaded ({missing}); install ficco (pip install .) and run it "
        "from outside its source folder"
    ) from missing

__all__ = ["MOST_LANES", "BoundPlan", "new_group", "trace_rows"]

MOST_LANES = _native.MAX_LANES  # native threads of a rank
_COMPUTE = ("gemm", "reduce", "bag")
_COPY, _RAISE, _WAIT, _CLEAR, _AFTER = range(5)
_INLINE = -1
_COLUMNS = 16  # of an op; their meaning is documented in ficco/_native.pyi
_PADDING = (0,) * 11


def new_group(world: int, machine: Machine, timeout_s: float) -> _native.Group:
    """Return the ranks' shared windows and lanes, paced if the machine's links have rates."""
    link = machine.link
    fabric = None
    if link.paced:
        per: Literal["pair", "port"] = "pair" if link.per == "pair" else "port"
        fabric = _native.Fabric(world, per, link.peak_gbps)
    return _native.Group(world, timeout_s, fabric)


class _Row(NamedTuple):
    """A row of the trace: a step, or a part of a gated one, or that part's waits and signals."""

    name: str
    step: Step
    kind: str


def trace_rows(plan: RankPlan) -> list[_Row]:
    """Return the rows of a plan's trace: its steps, then what each has besides.

    Waiting for other steps is no part of what a step lasts; a part waits, works, signals.
    """
    rows = [_Row(step.id, step, step.kind) for step in plan.steps]
    for step in plan.steps:
        if step.after:
            rows.append(_Row(f"{step.id}.after", step, "wait"))
        for number in range(len(step.parts)):
            name = f"{step.id}[{number}]"
            rows.append(_Row(f"{name}.wait", step, "wait"))
            rows.append(_Row(name, step, step.kind))
            rows.append(_Row(f"{name}.signal", step, "signal"))
    return rows


class _Work(NamedTuple):
    """A compute step, or one part of a gated one, that runs on the calling thread."""

    row: int  # in the trace
    step: Step
    work: Step | Part
    least_us: float  # by the machine's profile
    mark: int  # step to mark as done afterwards, or -1


class _Ops:
    """Op rows under construction, flat, and the segment that rows of the calling thread go to.

    Rows are made for every new shape, so this is written for speed: one tuple a row.
    """

    def __init__(self) -> None:
        self.lanes: list[int] = []
        self.inline: list[int] = []
        self.segment = 0

    def place(self, lane: int) -> tuple[list[int], int]:
        """Return the rows that a lane's ops go to, and their segment."""
        return (self.inline, self.segment) if lane == _INLINE else (self.lanes, 0)

    def array(self) -> npt.NDArray[np.int64]:
        """Return all rows, [count, 16], sorted by segment."""
        flat = np.frombuffer(array("q", self.lanes + self.inline), np.int64)
        return flat.reshape(-1, _COLUMNS)


class BoundPlan:
    """A rank's plan, bound to a group's windows and ready to run with any arrays of its shapes.

    Attributes:
        rows: what every row of the trace stands for.
    """

    def __init__(
        self,
        plan: RankPlan,
        group: _native.Group,
        machine: Machine,
        compute: Compute,
        in_order: bool = False,
    ) -> None:
        self.plan, self.group = plan, group
        self._compute, self._machine = compute, machine
        self.rows = trace_rows(plan)
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}
        self._item = {buffer.name: ELEMENT_BYTES[buffer.dtype] for buffer in plan.buffers}
        self._link = machine.link
        self._slots: dict[tuple[int, str], int] = {}
        self._places, _ = window_places(plan.buffers)
        self._lanes = self._native_lanes(in_order)
        self._program: list[_Work] = []
        self._bind()
        self._workspaces = {
            buffer.name: np.empty((buffer.rows, buffer.cols), dtype_of(buffer.dtype))
            for buffer in plan.buffers
            if buffer.role == "workspace"
        }
        self._times: npt.NDArray[np.int64] = np.zeros((len(self.rows), 2), np.int64)

    def _native_lanes(self, in_order: bool) -> dict[str, int]:
        """Number the lanes that get a thread: those without compute, or none at all."""
        computing: set[str] = set()
        others: dict[str, int] = {}
        for step in self.plan.steps:
            if step.kind == "collective":
                raise EngineError(
                    f"step {step.id!r}: the host engine has no {step.kind} steps; use a schedule "
                    "with transport='dma'"
                )
            if step.kind in _COMPUTE or step.unit == "sm":
                computing.add(step.lane)
        concurrent = [step.id for step in self.plan.steps if step.concurrent]
        if concurrent and in_order:
            raise EngineError(
                f"step {concurrent[0]!r} of rank {self.plan.rank} needs concurrent lanes, so the "
                "plan cannot run in order on one thread; use a schedule without such steps"
            )
        if concurrent and len(computing) > 1:
            raise EngineError(
                f"step {concurrent[0]!r} needs concurrent lanes, but the host engine runs the "
                f"compute lanes {sorted(computing)} on one thread; put them into one lane"
            )
        for step in self.plan.steps:
            if step.lane not in computing and not in_order:
                others.setdefault(step.lane, len(others))
        return others

    def _bind(self) -> None:
        ops = _Ops()
        steps = self.plan.steps
        index_of = {step.id: i for i, step in enumerate(steps)}
        awaited = {index_of[other] for step in steps for other in step.after}
        extra = len(steps)  # the next row of the trace that is no step of its own
        for i, step in enumerate(steps):
            lane = self._lanes.get(step.lane, _INLINE)
            for other in step.after:
                rows, segment = ops.place(lane)
                rows += (segment, lane, _AFTER, extra, index_of[other], *_PADDING)
            extra += bool(step.after)
            if step.parts:
                for number, part in enumerate(step.parts):
                    self._signals(ops, lane, _WAIT, extra, part.waits)
                    last = number == len(step.parts) - 1
                    self._computes(ops, extra + 1, step, part, i if last and i in awaited else -1)
                    self._signals(ops, lane, _RAISE, extra + 2, part.signals)
                    extra += 3
            elif step.kind in _COMPUTE:
                self._computes(ops, i, step, step, i if i in awaited else -1)
            elif step.kind in ("copy", "local_copy"):
                for source, target in zip(step.reads, step.writes, strict=True):
                    self._copy(ops, lane, i, source, target)
            else:
                kind = {"signal": _RAISE, "wait": _WAIT, "clear": _CLEAR}[step.kind]
                self._signals(ops, lane, kind, i, step.words)
        windows = [
            (slot, rank, self._places[name], self._pitch(name))
            for (rank, name), slot in self._slots.items()
            if name in self._places
        ]
        self._native = _native.Program(
            self.group,
            self.plan.rank,
            ops.array(),
            np.array(windows, np.int64).reshape(-1, 4),
            ops.segment + 1,
            len(self.rows),
            len(self._slots),
        )

    def _computes(self, ops: _Ops, row: int, step: Step, work: Step | Part, mark: int) -> None:
        for region in regions_of(work):
            if region.rank != self.plan.rank:
                raise EngineError(
                    f"step {step.id!r} computes on {region}; the host engine computes in its own "
                    "rank's buffers, so push the result by a copy step"
                )
        flops = sum(_flops(step, product) for product in work.products)
        dtype = self._buffers[work.products[0].a.buffer].dtype if work.products else "float32"
        least_us = self._machine.gemm_us(flops, dtype) if flops else 0.0
        self._program.append(_Work(row, step, work, least_us, mark))
        ops.segment += 1

    def _signals(
        self, ops: _Ops, lane: int, kind: int, index: int, words: tuple[Word, ...]
    ) -> None:
        rows, segment = ops.place(lane)
        value = 0 if kind == _CLEAR else 1
        for word in words:
            digest = 1 if word.name == "entered" and kind != _CLEAR else 0
            rows += (
                segment, lane, kind, index, word.rank, word_place(word), value, digest,
                0, 0, 0, 0, 0, 0, 0, word.copy,
            )  # fmt: skip

    def _copy(self, ops: _Ops, lane: int, index: int, source: Region, target: Region) -> None:
        item = self._item[source.buffer]
        link, slots = self._link, self._slots
        rank, there = source.rank, target.rank
        latency_ns = 0
        if rank == there:
            from_rank = to_rank = -1
        else:
            from_rank, to_rank = rank, there
            if link.paced:
                size = source.area * item
                latency_ns = round(1e3 * (link.transfer_us(size) - size / (link.peak_gbps * 1e3)))
        rows, segment = ops.place(lane)
        rows += (
            segment, lane, _COPY, index,
            slots.setdefault((rank, source.buffer), len(slots)), source.row0, source.col0 * item,
            slots.setdefault((there, target.buffer), len(slots)), target.row0, target.col0 * item,
            source.row1 - source.row0, (source.col1 - source.col0) * item,
            from_rank, to_rank, latency_ns, source.copy | target.copy << 1,
        )  # fmt: skip

    def _pitch(self, name: str) -> int:
        buffer = self._buffers[name]
        return buffer.cols * self._item[name]

    def run(self, arrays: Mapping[str, npt.NDArray[Any]], copy: int, digest: int) -> bool:
        """Run one call to its end.

        Args:
            arrays: inputs, weights and outputs by buffer name, of the plan's shapes and dtypes;
                inputs that copies read have unit stride along rows.
            copy: the window copy of this call.
            digest: the plan's.

        Returns:
            False if the group failed meanwhile; outputs are then NaN throughout.
        """
        done = False
        try:
            done = self._run(arrays, copy, digest)
        finally:
            if not done:
                self.spoil(arrays)
        return done

    def spoil(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Fill the outputs of a failed call with NaN: nothing is left that looks like a result."""
        for buffer in self.plan.buffers:
            if buffer.role == "output" and buffer.name in arrays:
                arrays[buffer.name].fill(np.nan)

    def _run(self, arrays: Mapping[str, npt.NDArray[Any]], copy: int, digest: int) -> bool:
        local = {**arrays, **self._workspaces}
        handles = self._handles(local, copy)
        addresses = np.zeros(len(self._slots), np.uint64)
        pitches = np.zeros(len(self._slots), np.int64)
        for (_, name), slot in self._slots.items():
            if name not in self._places:
                addresses[slot] = local[name].ctypes.data
                pitches[slot] = local[name].strides[0]
        native = self._native
        self._times[:] = 0
        try:
            native.start(copy, digest, addresses, pitches)
        except RuntimeError:
            if self.group.failure() is not None:
                return False  # another rank has failed before this one began
            raise
        try:
            for segment, work in enumerate(self._program):
                if not native.submit(segment):
                    break
                self._perform(work, handles)
            else:
                native.submit(len(self._program))
        except BaseException:
            self.group.fail(self.plan.rank)
            raise
        finally:
            done = native.finish()
        return done

    def _handles(
        self, local: Mapping[str, npt.NDArray[Any]], copy: int
    ) -> dict[tuple[str, int], Any]:
        compute, buffers = self._compute, self._buffers
        handles = {
            (name, 0): compute.handle(array, buffers[name].role == "weight")
            for name, array in local.items()
        }
        for name, place in self._places.items():
            buffer = buffers[name]
            for shift in range(buffer.copies):
                base = self.group.window(self.plan.rank, copy ^ shift) + place
                array = _array_at(base, buffer.rows, buffer.cols, buffer.dtype)
                handles[name, shift] = compute.handle(array)
        return handles

    def _perform(self, work: _Work, handles: dict[tuple[str, int], Any]) -> None:
        begin = _native.now_ns()
        step, compute = work.step, self._compute

        def view(region: Region) -> Any:
            handle = handles[region.buffer, region.copy]
            return handle[region.row0 : region.row1, region.col0 : region.col1]

        reads, writes = work.work.reads, work.work.writes
        if step.kind == "reduce":
            compute.reduce([view(r) for r in reads], view(writes[0]))
        elif step.kind == "bag":
            for i, target in enumerate(writes):
                table, indices, bags = reads[3 * i : 3 * i + 3]
                ends = handles[bags.buffer, 0]  # a bag ends where the next begins
                compute.bag(
                    view(table), view(indices)[0], ends[0], (bags.col0, bags.col1), view(target)
                )
        for product in work.work.products:
            a, b = view(product.a), view(product.b)
            compute.gemm(
                a.T if step.transpose_a else a,
                b.T if step.transpose_b else b,
                view(product.c),
                product.accumulate,
                [view(region) for region in product.add],
            )
        if work.least_us:
            _native.sleep_until_ns(begin + round(work.least_us * 1e3))
        self._times[work.row] = begin, _native.now_ns()
        if work.mark >= 0:
            self._native.mark(work.mark)

    def spans(self) -> list[Span]:
        """Return what the last call ran; times are of the monotonic clock, in us."""
        times = self._native.times()
        computed = self._times[:, 1] > 0
        times[computed] = self._times[computed]
        spans = []
        for row, (begin, end) in zip(self.rows, times.tolist(), strict=True):
            if end:
                step = row.step
                moved = sum(
                    region.area * self._item[region.buffer]
                    for region in step.writes
                    if row.kind == "copy"
                )
                unit = step.unit if row.kind == step.kind else "none"
                spans.append(
                    Span(self.plan.rank, step.lane, row.name, row.kind, unit,
                         begin / 1e3, end / 1e3, moved)
                )  # fmt: skip
        return spans


def _flops(step: Step, product: Product) -> float:
    depth = product.a.rows if step.transpose_a else product.a.cols
    return 2.0 * product.c.area * depth


def _array_at(address: int, rows: int, cols: int, dtype: str) -> npt.NDArray[Any]:
    """Return a window buffer as an array over the group's memory."""
    kind = dtype_of(dtype)
    memory = (ctypes.c_uint8 * (rows * cols * kind.itemsize)).from_address(address)
    array: npt.NDArray[Any] = np.frombuffer(memoryview(memory), np.uint8)
    return array.view(kind).reshape(rows, cols)
