"""The host engine: one rank's program on native threads and a compute library.

Lanes without launches are native threads. They get all their work in one call when a call starts.
Lanes with launches run on the calling thread in submission order, which is safe for every verified
plan. One native call does everything there between two launches.

    calling thread   submit 0 | gemm | submit 1 | gemm | ... | finish
    lane threads       copy, signal, copy, signal ...

A target that runs in order has no lane threads. Everything runs on the calling thread in submission
order, as on a single shared hardware queue.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ficco import _native
from ficco.core.errors import EngineError
from ficco.core.machine import Machine
from ficco.engine import bound_program
from ficco.engine.compute import Compute, dtype_of, experts
from ficco.plan import Region, window_places
from ficco.plan.timeline import Span
from ficco.program import Bag, Experts, Gemm, Launch, Program, Reduce, kernel_of
from ficco.program.encoding import Segment, encode

MOST_LANES = _native.MAX_LANES  # native threads of a rank


class BoundProgram(bound_program.BoundProgram):
    """A rank's program, bound to a group's windows."""

    def __init__(
        self,
        program: Program,
        group: _native.Group,
        machine: Machine,
        compute: Compute,
        digest: int,
    ) -> None:
        super().__init__(program, compute)
        self.group, self._digest = group, digest
        self._places, _ = window_places(program.buffers)
        encoded = encode(program, machine.paced_link)
        self._slots, self._segments = encoded.slots, encoded.segments
        self._least_us = [self._modelled_us(entry.launch, machine) for entry in encoded.segments]
        counts = (encoded.segment_count, encoded.row_count, len(encoded.slots))
        self._native = _native.Program(group, program.rank, encoded.ops, encoded.windows, *counts)
        self._workspaces = {
            buffer.name: np.empty((buffer.rows, buffer.cols), dtype_of(buffer.dtype))
            for buffer in program.buffers
            if buffer.role == "workspace"
        }
        self._written: dict[str, set[int]] = {}  # peers whose windows a launch writes, by buffer
        for launch in program.launches:
            for region in launch.work.targets if isinstance(launch.work, Experts) else ():
                self._written.setdefault(region.buffer, set()).add(region.rank)
        self._times: npt.NDArray[np.int64] = np.zeros((encoded.row_count, 2), np.int64)

    def _modelled_us(self, launch: Launch, machine: Machine) -> float:
        """Return the minimum duration of a launch by the machine's profile, in us."""
        work = launch.work
        if not isinstance(work, Gemm):
            return 0.0
        depth = work.a.rows if work.transpose_a else work.a.cols
        flops = 2.0 * work.c.area * depth
        return machine.paced_gemm_us(flops, self._buffers[work.a.buffer].dtype)

    def run(self, arrays: Mapping[str, npt.NDArray[Any]], copy: int, traced: bool = True) -> bool:
        """Run one call to completion.

        Args:
            arrays: inputs, weights and outputs by buffer name, of the plan's shapes and dtypes;
                inputs that copies read have unit stride along rows.
            copy: the window copy of this call.
            traced: ignored: times are always recorded.

        Returns:
            False if the group failed during the call; all outputs are then NaN.
        """
        done = False
        try:
            done = self._run(arrays, copy)
        finally:
            if not done:
                self.fill_nan(arrays)
        return done

    def _fill_nan(self, array: npt.NDArray[Any]) -> None:
        array.fill(np.nan)

    def _run(self, arrays: Mapping[str, npt.NDArray[Any]], copy: int) -> bool:
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
        done = False
        try:
            try:
                native.start(copy, self._digest, addresses, pitches)
            except RuntimeError:
                if self.group.failure() is not None:
                    return False  # another rank failed before this one began
                raise
            for number, segment in enumerate(self._segments):
                if not native.submit(number):
                    break
                self._perform(segment, self._least_us[number], handles)
            else:
                native.submit(len(self._segments))
        except BaseException:
            self.group.fail(self.program.rank)
            raise
        finally:
            if native.running:  # also if Ctrl-C came as it began
                done = native.finish()
        return done

    def _handles(
        self, local: Mapping[str, npt.NDArray[Any]], copy: int
    ) -> dict[tuple[int, str, int], Any]:
        """Return the handles of this rank's buffers, and of peers' windows that a launch writes."""
        compute, buffers, rank = self._compute, self._buffers, self.program.rank
        handles = {
            (rank, name, 0): compute.handle(array, buffers[name].role == "weight")
            for name, array in local.items()
        }
        for name, place in self._places.items():
            buffer = buffers[name]
            for shift in range(buffer.copies):
                for owner in {rank, *self._written.get(name, ())}:
                    base = self.group.window(owner, copy ^ shift) + place
                    array = _array_at(base, buffer.rows, buffer.cols, buffer.dtype)
                    handles[owner, name, shift] = compute.handle(array)
        return handles

    def _perform(
        self, segment: Segment, least_us: float, handles: dict[tuple[int, str, int], Any]
    ) -> None:
        begin = _native.now_ns()
        work, compute = segment.launch.work, self._compute

        def view(region: Region) -> Any:
            handle = handles[region.rank, region.buffer, region.copy]
            return handle[region.row0 : region.row1, region.col0 : region.col1]

        if isinstance(work, Gemm):
            a, b = view(work.a), view(work.b)
            a, b = a.T if work.transpose_a else a, b.T if work.transpose_b else b
            add = [view(region) for region in work.add]
            compute.gemm(a, b, view(work.c), work.accumulate, add)
        elif isinstance(work, Reduce):
            compute.reduce([view(r) for r in work.reads], view(work.target))
        elif isinstance(work, Bag):
            ends = handles[
                self.program.rank, work.bags.buffer, 0
            ]  # a bag ends where the next begins
            bags = (work.bags.col0, work.bags.col1)
            weights = None if work.weights is None else view(work.weights)[0]
            compute.bag(
                view(work.table), view(work.indices)[0], ends[0], bags, view(work.target), weights,
                work.mean,
            )  # fmt: skip
        elif isinstance(work, Experts):
            weight = None if work.weight is None else view(work.weight)
            sources, targets = map(view, work.sources), map(view, work.targets)
            experts.perform(
                work, self.program.rank, view(work.routing)[0], weight, [*sources], [*targets]
            )
        else:
            raise EngineError(f"the host engine has no {kernel_of(work)} launches")
        if least_us:
            _native.sleep_until_ns(begin + round(least_us * 1e3))
        self._times[segment.row] = begin, _native.now_ns()
        if segment.mark >= 0:
            self._native.mark(segment.mark)

    def spans(self) -> list[Span]:
        """Return the spans of the last call, in us of the monotonic clock."""
        times = self._native.times()
        computed = self._times[:, 1] > 0
        times[computed] = self._times[computed]
        return bound_program.spans_of(self.program, self.rows, times)


def _array_at(address: int, rows: int, cols: int, dtype: str) -> npt.NDArray[Any]:
    """Return a window buffer as an array over the group's memory."""
    kind = dtype_of(dtype)
    memory = (ctypes.c_uint8 * (rows * cols * kind.itemsize)).from_address(address)
    array: npt.NDArray[Any] = np.frombuffer(memoryview(memory), np.uint8)
    return array.view(kind).reshape(rows, cols)
