"""A plan as rows of numbers for the native simulator; see `simulate` in ficco/_native.pyi.

If copies are a kernel's stores, one kernel runs the whole plan: it is launched once, its GEMMs
share the time of the whole, and a signal takes only its transit time.

The selector encodes every candidate schedule, so this is written for speed: flat lists, and caches
of repeated results.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ficco.dtypes import ELEMENT_BYTES
from ficco.errors import PlanError
from ficco.machine import Link, Machine
from ficco.passes import COMPUTE
from ficco.passes.release import ends_of
from ficco.passes.signals import joined_raises, stored
from ficco.plan import Plan, RankPlan, Region, Signal, Step, copy_unit
from ficco.simulator.calls import Calls
from ficco.simulator.links import Ports, Transfer, Wires
from ficco.target import cuda_target, own_signals

__all__ = [
    "ACTION",
    "COPY",
    "ROW",
    "SIGNALS",
    "Encoded",
    "Encoder",
    "encode",
    "is_one_launch",
    "names",
    "start_ns",
]

_WAIT, _RAISE, _CLEAR, _DELAY, _WORK, COPY = range(6)
SIGNALS = (_WAIT, _RAISE, _CLEAR)  # actions on signals
ROW, ACTION, _TRANSFER = 4, 3, 3  # numbers in a row of each table

Numbers = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Encoded(NamedTuple):
    """The input of the native simulator, and the signals to describe its rows.

    Attributes:
        tables: lanes, starts, rows, afters, actions, transfers, signals.
        ports: ports of the links.
        signals: by number.
        host_ns: submission time of the call on the host of each rank.
    """

    tables: tuple[Integers, Numbers, Numbers, Integers, Numbers, Numbers, Integers]
    ports: Ports
    signals: list[Signal]
    host_ns: list[float]


def start_ns(rank: int, machine: Machine) -> float:
    """Return when a rank begins a call: rank 0 at 0, others at a fixed fraction of the skew."""
    return 1e3 * machine.costs.skew_us * (rank * 0.6180339887498949 % 1.0)


def names(plan: Plan) -> Iterator[tuple[int, Step, str]]:
    """Yield the meaning of every row: rank, step and the name of its span."""
    for entry in plan.ranks:
        for step in entry.steps:
            if step.parts:
                for number in range(len(step.parts)):
                    yield entry.rank, step, f"{step.id}[{number}]"
            else:
                yield entry.rank, step, step.id


def is_one_launch(plan: Plan, machine: Machine) -> bool:
    """Return whether every rank's plan is one kernel: on GPUs, if copies are a kernel's stores."""
    return machine.engine != "host" and any(
        step.kind == "copy" and step.unit == "sm" for entry in plan.ranks for step in entry.steps
    )


def encode(plan: Plan, machine: Machine, submitted: bool) -> Encoded:
    """Turn a plan into rows: one per step, or per part of a gated step.

    Args:
        plan: the plan of all ranks.
        machine: a rated machine with enough ranks.
        submitted: whether the host submits steps while they run; otherwise all are submitted at
            the start.

    Raises:
        PlanError: a step has an unknown kind, or its `after` names no earlier step.
        MachineError: ranks are on different nodes, and the network has no rate.
    """
    encoder = Encoder(plan, machine, submitted)
    host_ns = [encoder.add(entry) for entry in plan.ranks]
    signals = list(encoder.signals)
    starts = [start_ns(rank, machine) for rank in range(plan.problem.world)]
    at_start = [number for signal in signals for number in (signal[0], signal[1] == "free")]
    tables = (
        _integers(encoder.lanes),
        _numbers(starts),
        _numbers(encoder.rows).reshape(-1, ROW),
        _integers(encoder.afters),
        _numbers(encoder.actions).reshape(-1, ACTION),
        _numbers(encoder.transfers).reshape(-1, _TRANSFER),
        _integers(at_start).reshape(-1, 2),
    )
    return Encoded(tables, encoder.wires.ports, signals, host_ns)


def _numbers(values: list[float]) -> Numbers:
    return np.array(array("d", values))


def _integers(values: list[int]) -> Integers:
    return np.array(array("q", values))


class _Wire(NamedTuple):
    """The link to a peer, and the properties of a copy, besides its size, that affect its rate."""

    link: Link
    by_rows: bool
    by_turns: bool


class Encoder:
    """Builder of rows; ranks are added one after another.

    Attributes:
        submitting: host times of the rank added last: before all steps, and of each step.
    """

    def __init__(self, plan: Plan, machine: Machine, submitted: bool) -> None:
        costs = machine.costs
        self.costs, self.submitted = costs, submitted
        self.once, self.gathers = is_one_launch(plan, machine), plan.problem.flow.own_columns
        self.twice = plan.schedule.shots == "two"
        # A local copy counts as work, which shares the device with kernels (on the host, the
        # memory). A `copy` within a rank does so only if a kernel copies.
        self.copies_by_kernel = copy_unit(machine.engine, same_device=True) == "sm"
        signals = 0.0 if self.once else 1e3  # threads of a kernel read and raise many in parallel
        self.signal_ns, self.clear_ns = signals * costs.signal_us, signals * costs.clear_us
        self.launch_ns = 1e3 * costs.launch_us
        self.host_words_ns, self.host_copy_ns = 1e3 * costs.host_words_us, 1e3 * costs.host_copy_us
        self.host_launch_ns = 1e3 * costs.host_launch_us
        own = machine.engine == "cuda"  # this engine launches its own kernels natively
        self.host_kernel_ns = 1e3 * costs.host_kernel_us if own else self.host_launch_ns
        native_us = costs.host_native_us if own and plan.schedule.compute == "gated" else None
        self.native_ns = None if native_us is None else 1e3 * native_us
        self.machine, self.wires = machine, Wires(machine, plan.problem.world)
        self.calls = Calls(machine, plan.problem.dtype)
        self.signals: defaultdict[Signal, int] = defaultdict(count().__next__)
        self.lanes: list[int] = []
        self.rows: list[float] = []
        self.afters: list[int] = []
        self.actions: list[float] = []
        self.transfers: list[float] = []
        self.submitting: list[float] = []
        self.known: dict[tuple[str, int, int, bool], int] = {}  # numbers of transfers
        compute = self.compute
        self.encoders: dict[str, Callable[[Step], float]] = {
            "copy": self._copy, "raise": self._signal, "wait": self._wait, "clear": self._clear,
            "gemm": compute, "reduce": compute, "local_copy": compute, "bag": compute,
        }  # fmt: skip
        self.rank, self.lane = 0, 0
        self.last: dict[int, int] = {}  # by lane: the last peer that it sent to since its last wait
        self.wire_to: dict[int, _Wire] = {}
        self.within: set[str] = set()  # steps that a kernel performs itself
        self.stores: dict[str, int] = {}  # steps whose words kernels store; number of new kernels
        self.item: dict[str, int] = {}
        self.cols: dict[str, int] = {}

    def add(self, entry: RankPlan) -> float:
        """Add a rank's rows; return its host's time for the whole call."""
        self.rank = entry.rank
        self.wire_to.clear()
        self.item = {buffer.name: ELEMENT_BYTES[buffer.dtype] for buffer in entry.buffers}
        self.cols = {buffer.name: buffer.cols for buffer in entry.buffers}
        if self.machine.engine == "cuda":
            self.within = {end.id for ends in ends_of(entry).values() for end in ends}
            self.stores = {} if self.once else _stored(entry, self.within, self.machine.signals)
        self.calls.use(entry)
        rows, actions, encoders = self.rows, self.actions, self.encoders
        host_ns = 1e3 * self.costs.host_call_us
        if self.native_ns is not None:
            host_ns = self.native_ns
        if self.once:
            self.calls.use_as_one(entry.steps, self.gathers, self.twice)
            direct_ns = 1e3 * self.costs.host_direct_us
            host_ns = direct_ns or host_ns + self.host_kernel_ns
            host_ns += self.host_launch_ns if self.calls.before_ns else 0.0
        self.submitting = [host_ns]
        lanes: dict[str, int] = {}
        row_of: dict[str, int] = {}
        number = len(rows) // ROW
        for step in entry.steps:
            lane = lanes.get(step.lane)
            if lane is None:
                lane = lanes[step.lane] = len(self.lanes)
                self.lanes.append(entry.rank)
            self.lane = lane
            for other in step.after:
                if other not in row_of:
                    raise PlanError(
                        f"rank {entry.rank}, step {step.id!r} comes after {other!r}, but no step "
                        "before it has that id; `ficco plan --check` proves a plan"
                    )
                self.afters.append(row_of[other])
            if step.parts:
                submitting_ns = self.host_kernel_ns
                host_ns += submitting_ns
                number += self._parts(step, lane, host_ns if self.submitted else 0.0)
            else:
                if step.kind not in encoders:
                    raise PlanError(
                        f"rank {entry.rank}, step {step.id!r}: steps of kind {step.kind!r} cannot "
                        f"be simulated; those that can are {', '.join(encoders)}"
                    )
                before = len(actions)
                if self.once and not row_of:
                    self._launch()
                submitting_ns = encoders[step.kind](step)
                submitting_ns = 0.0 if self.once else submitting_ns
                host_ns += submitting_ns
                number_of_actions = (len(actions) - before) // ACTION
                not_before = host_ns if self.submitted else 0.0
                rows += (lane, not_before, len(step.after), number_of_actions)
                number += 1
            self.submitting.append(submitting_ns)
            row_of[step.id] = number - 1
        return host_ns

    def _launch(self) -> None:
        """Add the actions before the begin of a rank's one launch."""
        if self.calls.before_ns:
            self._delay(self.launch_ns)
            self.actions += (_WORK, 0, self.calls.before_ns)
        rendezvous_us = self.costs.direct_us if self.gathers else 0.0
        self._delay(self.launch_ns + 1e3 * rendezvous_us)

    # The following methods append the actions of a step and return its submission time in ns.

    def _wait(self, step: Step) -> float:
        self.last.pop(self.lane, None)
        for signal in step.signals:
            self.actions += (_WAIT, self.signals[signal], 0)
        return self.host_words_ns

    def _signal(self, step: Step) -> float:
        submitting_ns = self._write(step, _RAISE, self.signal_ns)
        copied = self.machine.engine == "cuda" and self.machine.signals == "copy"
        if copied and step.id not in self.stores and step.id not in self.within:
            return self.host_copy_ns * len(step.signals)  # one copy per signal
        return submitting_ns

    def _clear(self, step: Step) -> float:
        return self._write(step, _CLEAR, self.clear_ns)

    def _write(self, step: Step, action: int, word_ns: float) -> float:
        alone = step.id not in self.within
        new = self.stores.get(step.id)
        self._delay(alone * (word_ns * len(step.signals) if new is None else new * self.launch_ns))
        for signal in step.signals:
            self.actions += (action, self.signals[signal], 0)
        return alone * self.host_words_ns

    def _copy(self, step: Step) -> float:
        for source, target in zip(step.reads, step.writes, strict=True):
            _, buffer, row0, row1, col0, col1, _ = source
            size = (row1 - row0) * (col1 - col0) * self.item[buffer]
            if target.rank == self.rank:  # no link: memory is read and written
                ns = 1e3 * self.machine.stream_us(2 * size)
                if self.copies_by_kernel and source.rank == target.rank:
                    self._delay(self.launch_ns)
                    self.actions += (_WORK, 0, ns)
                else:
                    self._delay(ns)
            else:
                self.actions += (COPY, target.rank, self._transfer(source, target, size))
        return self.host_copy_ns * len(step.reads)

    def compute(self, step: Step) -> float:
        """Add the calls of a step that is not gated; return their submission time in ns."""
        if self.once:
            ns = self.calls.within(step)
            if ns:
                self.actions += (_WORK, 0, ns)
            return 0.0
        return self.called(step.kind, self.calls.of(step))

    def called(self, kind: str, calls: Sequence[float]) -> float:
        """Add calls of these durations for a kind of step; return their submission time in ns."""
        for ns in calls:
            self._delay(self.launch_ns)
            if ns:
                self.actions += (_WORK, 0, ns)
        native = {"reduce": self.host_kernel_ns, "local_copy": self.host_copy_ns}
        return native.get(kind, self.host_launch_ns) * len(calls)

    def _parts(self, step: Step, lane: int, not_before: float) -> int:
        """Add a row for every part of a gated step; return the number of parts."""
        actions = self.actions
        for number, (part, ns) in enumerate(zip(step.parts, self.calls.parts(step), strict=True)):
            before = len(actions)
            for signal in part.waits:
                actions += (_WAIT, self.signals[signal], 0)
            if number == 0 or self.machine.cores:  # cores run each part separately
                self._delay(self.launch_ns)
            if ns:
                actions += (_WORK, 0, ns)
            if part.raises:
                self._delay(self.signal_ns * len(part.raises))
                for signal in part.raises:
                    actions += (_RAISE, self.signals[signal], 0)
            afters = 0 if number else len(step.after)
            self.rows += (lane, not_before, afters, (len(actions) - before) // ACTION)
        return len(step.parts)

    def _delay(self, ns: float) -> None:
        if ns:
            self.actions += (_WORK if self.machine.cores else _DELAY, 0, ns)

    def _transfer(self, source: Region, target: Region, size: int) -> int:
        """Return the number of the transfer of a copy; equal transfers share a number."""
        to = target.rank
        wire = self.wire_to.get(to)
        if wire is None:
            link = self.wires.link(self.rank, to)
            wire = self.wire_to[to] = _Wire(link, bool(link.row_gbps), bool(link.turn_us))
        row_bytes, turned = 0, False
        if self.once:
            return self._numbered((wire.link.scope, size, row_bytes, turned), wire.link)
        if wire.by_rows and source.rows > 1:
            # Windows are equal on all ranks, so the own buffers describe a peer's.
            apart = any(box.cols < self.cols[box.buffer] for box in (source, target))
            row_bytes = source.cols * self.item[source.buffer] if apart else 0
        if wire.by_turns:
            turned = self.last.get(self.lane, to) != to
            self.last[self.lane] = to
        return self._numbered((wire.link.scope, size, row_bytes, turned), wire.link)

    def _numbered(self, key: tuple[str, int, int, bool], link: Link) -> int:
        number = self.known.get(key)
        if number is None:
            number = self.known[key] = len(self.known)
            _, size, row_bytes, turned = key
            if self.once:  # the latency of a store is part of its signal's
                self.transfers += Transfer(0.0, size, link.peak_gbps)
            else:
                self.transfers += self.wires.transfer(link, size, row_bytes, turned)
        return number


def _stored(entry: RankPlan, within: set[str], signal_kind: str) -> dict[str, int]:
    """Return the steps whose signals kernels store, and the kernels that begin at each."""
    target = cuda_target(() if signal_kind == "write" else own_signals(entry.rank))
    inline = {step.lane for step in entry.steps if step.kind in COMPUTE}
    joined = joined_raises(entry, inline, target)
    stores: dict[str, int] = {}
    for step in entry.steps:
        if step.kind not in ("clear", "raise") or step.lane not in inline or step.id in within:
            continue
        if step.id in stores:  # the kernel of the `clear` before it stores it
            continue
        behind = joined.get(step.id)
        clears = step.signals if step.kind == "clear" else ()
        raises = () if clears else step.signals
        raises = raises if behind is None else behind.signals
        writes = stored(step.id, step.lane, (), clears, raises, inline=True, target=target)
        kernels = [write for write in writes if write.how == "kernel"]
        if kernels:
            stores[step.id] = len(kernels)
            stores |= {} if behind is None else {behind.id: 0}
    return stores
