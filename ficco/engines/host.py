"""The host engine: one rank's plan on native threads and a compute library.

Lanes without compute are native threads. They get all their work in one call when the plan starts.
Lanes with compute run on the calling thread in submission order, which is safe for every verified
plan. One native call does everything there between two compute steps.

    calling thread   submit 0 | gemm | submit 1 | gemm | ... | finish
    lane threads       copy, signal, copy, signal ...

With `in_order` there are no lane threads. Everything runs on the calling thread in submission
order, as on a single shared hardware queue.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ficco.compute import Compute, dtype_of
from ficco.dtypes import ELEMENT_BYTES
from ficco.engines.rows import COMPUTE, Work, encode, trace_rows
from ficco.errors import EngineError
from ficco.machine import Machine
from ficco.plan import Product, RankPlan, Region, Step, window_places
from ficco.timeline import Span

try:
    from ficco import _native
except ImportError as missing:
    raise EngineError(
        f"the native core cannot be loaded ({missing}); install ficco (pip install .) and run it "
        "from outside its source folder"
    ) from missing

__all__ = ["MOST_LANES", "BoundPlan", "new_group"]

MOST_LANES = _native.MAX_LANES  # native threads of a rank


def new_group(world: int, machine: Machine, timeout_s: float) -> _native.Group:
    """Return the ranks' shared windows and lanes, paced if the machine has a paced link."""
    link = machine.paced_link
    fabric = None
    if link is not None:
        per: Literal["pair", "port"] = "pair" if link.per == "pair" else "port"
        fabric = _native.Fabric(world, per, link.peak_gbps)
    return _native.Group(world, timeout_s, fabric)


class BoundPlan:
    """A rank's plan, bound to a group's windows and ready to run with any arrays of its shapes.

    Attributes:
        rows: the meaning of each row of the trace.
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
        self._places, _ = window_places(plan.buffers)
        self._lanes = self._native_lanes(in_order)
        self._bind()
        self._workspaces = {
            buffer.name: np.empty((buffer.rows, buffer.cols), dtype_of(buffer.dtype))
            for buffer in plan.buffers
            if buffer.role == "workspace"
        }
        self._times: npt.NDArray[np.int64] = np.zeros((len(self.rows), 2), np.int64)

    def _native_lanes(self, in_order: bool) -> dict[str, int]:
        """Number the lanes that get a thread: those without compute, or none if in order."""
        computing: set[str] = set()
        others: dict[str, int] = {}
        for step in self.plan.steps:
            if step.kind == "collective":
                raise EngineError(
                    f"step {step.id!r}: the host engine has no {step.kind} steps; use a schedule "
                    "with transport='dma'"
                )
            if step.kind in COMPUTE:  # local copies have unit "sm", too, but lane threads do them
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
        encoded = encode(self.plan, self._lanes, link=self._machine.paced_link, at_once=True)
        self._slots, self._program = encoded.slots, encoded.works
        self._least_us = [self._modelled_us(work) for work in encoded.works]
        self._native = _native.Program(
            self.group,
            self.plan.rank,
            encoded.ops,
            encoded.windows,
            encoded.segments,
            len(self.rows),
            len(encoded.slots),
        )

    def _modelled_us(self, work: Work) -> float:
        """Return the minimum duration of a piece of work by the machine's profile, in us."""
        products = work.work.products
        if not products:
            return 0.0
        flops = sum(_flops(work.step, product) for product in products)
        return self._machine.paced_gemm_us(flops, self._buffers[products[0].a.buffer].dtype)

    def run(self, arrays: Mapping[str, npt.NDArray[Any]], copy: int, digest: int) -> bool:
        """Run one call to completion.

        Args:
            arrays: inputs, weights and outputs by buffer name, of the plan's shapes and dtypes;
                inputs that copies read have unit stride along rows.
            copy: the window copy of this call.
            digest: the plan's.

        Returns:
            False if the group failed during the call; all outputs are then NaN.
        """
        done = False
        try:
            done = self._run(arrays, copy, digest)
        finally:
            if not done:
                self.fill_nan(arrays)
        return done

    def fill_nan(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Fill the outputs of a failed call with NaN, so that they do not look like results."""
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
                return False  # another rank failed before this one began
            raise
        try:
            for segment, work in enumerate(self._program):
                if not native.submit(segment):
                    break
                self._perform(work, self._least_us[segment], handles)
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

    def _perform(self, work: Work, least_us: float, handles: dict[tuple[str, int], Any]) -> None:
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
        if least_us:
            _native.sleep_until_ns(begin + round(least_us * 1e3))
        self._times[work.row] = begin, _native.now_ns()
        if work.mark >= 0:
            self._native.mark(work.mark)

    def spans(self) -> list[Span]:
        """Return the spans of the last call, in us of the monotonic clock."""
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
