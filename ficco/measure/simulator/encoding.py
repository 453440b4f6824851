"""Programs as rows of numbers for the native simulator; see `simulate` in ficco/_native.pyi.

An entry of a program is a row, but for two launches: each part of a gated GEMM is a row, and so is
each step of a kernel that runs a whole call. In such a kernel a signal takes only its transit time.

The selector encodes every candidate schedule, so this is written for speed: flat lists, and caches
of repeated results.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ficco.core.dtypes import ELEMENT_BYTES
from ficco.core.machine import Link, Machine
from ficco.lowering.one_kernel_steps import steps_of_one_kernel
from ficco.measure.simulator.calls import Calls
from ficco.measure.simulator.links import Ports, Transfer, Wires
from ficco.operators.problem import Problem
from ficco.plan import Buffer, Region, Signal, Step, copy_unit, signal_at
from ficco.plan.tables import GatedPart, GatherTable, PoolTable, PullTable, SendTable, WindowRelease
from ficco.program import (
    Copy,
    Entry,
    Gated,
    Launch,
    OneKernel,
    Program,
    SignalWrite,
    Wait,
    kind_of,
)
from ficco.program.target import HOST, Target, cuda_target, hip_target, own_signals

_WAIT, _RAISE, _CLEAR, _DELAY, _WORK, COPY = range(6)
SIGNALS = (_WAIT, _RAISE, _CLEAR)  # actions on signals
_OF_SIGNALS = {"wait": _WAIT, "raise": _RAISE, "clear": _CLEAR}  # by kind of a kernel's step
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


class RowName(NamedTuple):
    """The meaning of a row.

    Attributes:
        rank, lane, name, kind, unit: of its span.
        copied: the sources of a copy to a peer.
    """

    rank: int
    lane: str
    name: str
    kind: str
    unit: str
    copied: tuple[Region, ...] = ()


def names(programs: Sequence[Program]) -> Iterator[RowName]:
    """Yield the meaning of every row."""
    for program in programs:
        for entry in program.entries:
            yield from _names(program, entry)


def _names(program: Program, entry: Entry) -> Iterator[RowName]:
    rank, lane, kind = program.rank, entry.lane, kind_of(entry)
    if isinstance(entry, Copy):
        within = entry.target.rank == rank
        unit = copy_unit(program.target.name, same_device=within)
        copied: tuple[Region, ...] = () if within else (entry.source,)
        yield RowName(rank, lane, entry.id, "local_copy" if within else kind, unit, copied)
    elif not isinstance(entry, Launch):
        yield RowName(rank, lane, entry.id, kind, "none")
    elif isinstance(entry.work, Gated):
        for number in range(len(entry.work.parts)):
            yield RowName(rank, lane, f"{entry.id}[{number}]", kind, "sm")
    elif isinstance(entry.work, OneKernel):
        for step in _steps_within(program.buffers, entry, entry.work):
            copied = step.reads if step.kind == "copy" else ()
            yield RowName(rank, lane, step.id, step.kind, step.unit, copied)
    else:
        yield RowName(rank, lane, entry.id, kind, "sm")


def signals_raised(program: Program, entry: Entry) -> Sequence[Signal]:
    """Return the signals that an entry raises."""
    work = entry.work if isinstance(entry, Launch) else None
    if isinstance(entry, SignalWrite):
        return entry.raises
    if isinstance(work, Gated):
        raised = [signal_at(program.rank, p.signal) for p in work.parts if p.signal >= 0]
        release = work.release
        return [*raised, *([] if release is None else _released(release))]
    if isinstance(work, OneKernel):
        steps = _steps_within(program.buffers, entry, work)
        return [signal for step in steps if step.kind == "raise" for signal in step.signals]
    return ()


def _released(release: WindowRelease) -> list[Signal]:
    return [signal_at(peer, release.raised) for peer in release.peers]


def _steps_within(buffers: tuple[Buffer, ...], launch: Entry, work: OneKernel) -> list[Step]:
    return steps_of_one_kernel(launch.id, launch.lane, work.table, buffers)


def is_one_launch(programs: Sequence[Program]) -> bool:
    """Return whether one kernel runs the whole call on some rank, and so on every rank."""
    return any(is_whole_call(program.entries) for program in programs)


def is_whole_call(entries: Sequence[Entry]) -> bool:
    """Return whether a kernel runs a whole call, with or without products of a library."""
    return any(isinstance(each, Launch) and isinstance(each.work, OneKernel) for each in entries)


def encode(
    problem: Problem, programs: Sequence[Program], machine: Machine, submitted: bool
) -> Encoded:
    """Turn the programs of all ranks into rows.

    Args:
        problem: of the programs.
        programs: by rank.
        machine: a rated machine with enough ranks.
        submitted: whether the host submits entries while they run; otherwise all are submitted at
            the start.

    Raises:
        MachineError: ranks are on different nodes, and the network has no rate.
    """
    encoder = Encoder(problem, machine, submitted, once=is_one_launch(programs))
    host_ns = [encoder.add(program) for program in programs]
    signals = list(encoder.signals)
    starts = [start_ns(rank, machine) for rank in range(problem.world)]
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

    Args:
        problem: of the programs.
        machine: a rated machine.
        submitted: whether the host submits entries while they run.
        once: whether one kernel runs the whole call.

    Attributes:
        costs: host times of the rank added last: before all entries, and of each row.
        summed: [begin, end) among the actions of the rank added last: the waits of each part that
            adds what its peers push.
    """

    def __init__(
        self, problem: Problem, machine: Machine, submitted: bool, once: bool = False
    ) -> None:
        costs = machine.costs
        self.machine, self.submitted, self.once = machine, submitted, once
        self.world = problem.world
        # A copy within a device occupies multiprocessors if a kernel copies.
        self.copies_by_kernel = copy_unit(machine.engine, same_device=True) == "sm"
        self.signal_ns, self.clear_ns = 1e3 * costs.signal_us, 1e3 * costs.clear_us
        self.launch_ns = 1e3 * costs.launch_us
        self.host_words_ns, self.host_copy_ns = 1e3 * costs.host_words_us, 1e3 * costs.host_copy_us
        self.host_launch_ns = 1e3 * costs.host_launch_us
        self.own = machine.engine == "cuda"  # this engine launches its own kernels natively
        self.host_kernel_ns = 1e3 * costs.host_kernel_us if self.own else self.host_launch_ns
        self.wires = Wires(machine, problem.world)
        self.calls = Calls(machine, problem.dtype)
        self.signals: defaultdict[Signal, int] = defaultdict(count().__next__)
        self.lanes: list[int] = []
        self.rows: list[float] = []
        self.afters: list[int] = []
        self.actions: list[float] = []
        self.transfers: list[float] = []
        self.costs: list[float] = []
        self.summed: list[tuple[int, int]] = []
        self.known: dict[tuple[str, int, int, bool], int] = {}  # numbers of transfers
        self.rank, self.lane = 0, 0
        self.host_ns = 0.0
        self.inline: set[str] = set()  # lanes with launches
        self.lane_of: dict[str, int] = {}
        self.last: dict[int, int] = {}  # by lane: the last peer that it sent to since its last wait
        self.wire_to: dict[int, _Wire] = {}
        self.buffers: tuple[Buffer, ...] = ()
        self.item: dict[str, int] = {}
        self.cols: dict[str, int] = {}
        self._adders: dict[type, Callable[[Any], float | None]] = {
            Copy: self._copy, Wait: self._wait, SignalWrite: self._write, Launch: self._launch,
        }  # fmt: skip

    def add(self, program: Program) -> float:
        """Add a rank's rows; return its host's time for the whole call."""
        self.begin(program.rank, program.buffers, program.entries)
        row_of: dict[str, int] = {}
        for entry in program.entries:
            if entry.after:
                self.afters += [row_of[name] for name in entry.after]
            self.add_entry(entry)
            row_of[entry.id] = len(self.rows) // ROW - 1
        return self.host_ns

    def begin(self, rank: int, buffers: Sequence[Buffer], entries: Sequence[Entry]) -> None:
        """Begin a rank whose program has these buffers and entries."""
        self.rank, self.buffers = rank, tuple(buffers)
        self.wire_to.clear()
        self.item = {buffer.name: ELEMENT_BYTES[buffer.dtype] for buffer in buffers}
        self.cols = {buffer.name: buffer.cols for buffer in buffers}
        self.calls.use(buffers)
        self.lane_of, self.summed = {}, []
        launches = [entry for entry in entries if isinstance(entry, Launch)]
        self.inline = {launch.lane for launch in launches}
        self.host_ns = self._call_ns(launches)
        self.costs = [self.host_ns]

    def _call_ns(self, launches: Sequence[Launch]) -> float:
        """Return the host's time of a call before it submits entries."""
        costs = self.machine.costs
        ns = 1e3 * costs.host_call_us
        gated = any(isinstance(launch.work, Gated) for launch in launches)
        if self.own and gated and costs.host_native_us is not None:
            ns = 1e3 * costs.host_native_us
        if self.once:
            ns = 1e3 * costs.host_direct_us or ns + self.host_kernel_ns
        return ns

    def add_entry(self, entry: Entry) -> None:
        """Add the rows of an entry; its `after` is already in `afters`."""
        lane = self.lane_of.get(entry.lane)
        if lane is None:
            lane = self.lane_of[entry.lane] = len(self.lanes)
            self.lanes.append(self.rank)
        self.lane = lane
        before = len(self.actions)
        cost_ns = self._adders[type(entry)](entry)
        if cost_ns is not None:
            self._end_row(len(entry.after), before, cost_ns)

    def _end_row(self, afters: int, before: int, cost_ns: float) -> None:
        """Add the row of the actions since `before`, and the time in which the host submits it."""
        self.host_ns += cost_ns
        self.costs.append(cost_ns)
        not_before = self.host_ns if self.submitted else 0.0
        self.rows += (self.lane, not_before, afters, (len(self.actions) - before) // ACTION)

    # The following methods append actions, and return the time in which the host submits them.

    def _wait(self, entry: Wait) -> float:
        self.last.pop(self.lane, None)
        by_kernel = entry.how == "kernel"
        if by_kernel:
            self._delay(self.launch_ns)
        for signal in entry.signals:
            self.actions += (_WAIT, self.signals[signal], 0)
        return self.host_kernel_ns if by_kernel else self.host_words_ns

    def _write(self, entry: SignalWrite) -> float:
        _, _, _, clears, raises, how = entry
        if how == "kernel":
            self._delay(self.launch_ns)
        else:
            self._delay(self.clear_ns * len(clears) + self.signal_ns * len(raises))
        self._store(_CLEAR, clears)
        self._store(_RAISE, raises)
        copied = len(clears) + len(raises)
        return self.host_copy_ns * copied if how == "copy" else self.host_words_ns

    def _store(self, action: int, signals: Sequence[Signal]) -> None:
        for signal in signals:
            self.actions += (action, self.signals[signal], 0)

    def _copy(self, entry: Copy) -> float:
        source, target = entry.source, entry.target
        from_rank, buffer, row0, row1, col0, col1, *_ = source
        size = (row1 - row0) * (col1 - col0) * self.item[buffer]
        if target.rank != self.rank:
            self.actions += (COPY, target.rank, self._transfer(source, target, size))
        elif from_rank == self.rank:
            self._copy_within(size, entry.lane)
        else:  # no link: memory is read and written
            self._delay(self.calls.copied(size))
        return self.host_copy_ns

    def add_local_copy(self, size_bytes: int, lane: str) -> None:
        """Add the row of a copy within the rank, which begins after the lane's earlier rows."""
        before = len(self.actions)
        self._copy_within(size_bytes, lane)
        self._end_row(0, before, self.host_copy_ns)

    def _copy_within(self, size_bytes: int, lane: str) -> None:
        if self.copies_by_kernel or lane in self.inline:
            self._work(self.calls.copied(size_bytes))
        else:
            self._delay(self.calls.copied(size_bytes))

    def _launch(self, entry: Launch) -> float | None:
        """Return None if the rows are already added."""
        work = entry.work
        if isinstance(work, Gated):
            self._gated(entry, work)
            return None
        if isinstance(work, OneKernel):
            self._whole_call(entry, work)
            return None
        self._work(self.calls.of(work))
        if self.once:
            return 1e3 * self.machine.costs.host_product_us or self.host_launch_ns
        return self.host_kernel_ns if entry.by == "native" else self.host_launch_ns

    def _work(self, ns: float) -> None:
        self._delay(self.launch_ns)
        if ns:
            self.actions += (_WORK, 0, ns)

    def _gated(self, entry: Launch, work: Gated) -> None:
        """Add a row for every part of a gated launch."""
        actions = self.actions
        for number, (part, ns) in enumerate(zip(work.parts, self.calls.parts(work), strict=True)):
            before = len(actions)
            waits = _awaited(self.rank, part)
            for signal in waits:
                actions += (_WAIT, self.signals[signal], 0)
            if part.terms:
                self.summed.append((before // ACTION, len(actions) // ACTION))
            if number == 0:
                self._delay(self.launch_ns)
            if ns:
                actions += (_WORK, 0, ns)
            if part.signal >= 0:
                self._delay(self.signal_ns)
                actions += (_RAISE, self.signals[signal_at(self.rank, part.signal)], 0)
            first = number == 0
            self._end_row(len(entry.after) * first, before, self.host_kernel_ns * first)
        if work.release is not None:  # the last part also releases the window
            release = work.release
            self._store(_CLEAR, [signal_at(self.rank, place) for place in release.cleared])
            self._store(_RAISE, _released(release))
            self.rows[-1] += len(release.cleared) + len(release.peers)

    def _whole_call(self, entry: Launch, work: OneKernel) -> None:
        """Add a row for every step of a kernel that runs a whole call.

        A read of a peer's window takes the link like a copy of as many bytes to that peer. Sums of
        bags are sent while later ones are made, and rows of x while rows are multiplied: work and
        sending take the longer of both times. Products are sent when a round of tiles is made.
        """
        steps = _steps_within(self.buffers, entry, work)
        self.calls.use_as_one(work, steps)
        costs, table = self.machine.costs, work.table
        begin_us = costs.launch_us
        overlaps, ahead_ns = isinstance(table, PoolTable), 0.0
        copied = isinstance(table, SendTable) and not table.sends_products
        if isinstance(table, (GatherTable, SendTable)) or overlaps:
            begin_us += costs.direct_us
        elif isinstance(table, PullTable):  # it overlaps its start with its GEMM's end
            waits = 3 if table.twice else 2
            begin_us = max(0.0, costs.pulling_us(table.twice) - waits * costs.store_us)
        for at, step in enumerate(steps):
            before = len(self.actions)
            if at == 0:
                self._delay(1e3 * begin_us)
            if step.kind == "wait" and isinstance(table, SendTable) and table.finish == "keep":
                ahead_ns = 0.0  # the copies that follow begin when rows have arrived
            if step.kind in _OF_SIGNALS:
                self._store(_OF_SIGNALS[step.kind], step.signals)
            elif step.kind == "copy":
                if copied:
                    ahead_ns += self._sending_ns(step)
                for source, target in zip(step.reads, step.writes, strict=True):
                    size = source.area * self.item[source.buffer]
                    peer = target.rank
                    if peer == self.rank:
                        peer, size = source.rank, round(size * costs.peer_reads)
                    elif copied:
                        size = round(size * costs.peer_reads)
                    link = self._wire(peer).link
                    number = self._numbered((link.scope, size, 0, False), link)
                    self.actions += (COPY, peer, number)
            elif ns := self.calls.within(step):
                behind_ns = self._sending_ns(steps[at + 1]) if overlaps else 0.0
                hidden_ns = behind_ns or min(ahead_ns, ns)
                ahead_ns -= min(ahead_ns, hidden_ns)
                self.actions += (_WORK, 0, max(0.0, ns - hidden_ns))
            self._end_row(0, before, 0.0)

    def _sending_ns(self, step: Step) -> float:
        """Return the time that the copies of a step to peers take, one after another."""
        pairs = zip(step.reads, step.writes, strict=True) if step.kind == "copy" else ()
        return sum([self.item[source.buffer] * source.area / self._wire(at.rank).link.peak_gbps
                    for source, at in pairs])  # fmt: skip

    def _delay(self, ns: float) -> None:
        if ns:
            self.actions += (_WORK if self.machine.cores else _DELAY, 0, ns)

    def _wire(self, to: int) -> _Wire:
        wire = self.wire_to.get(to)
        if wire is None:
            link = self.wires.link(self.rank, to)
            wire = self.wire_to[to] = _Wire(link, bool(link.row_gbps), bool(link.turn_us))
        return wire

    def _transfer(self, source: Region, target: Region, size: int) -> int:
        """Return the number of the transfer of a copy; equal transfers share a number."""
        wire = self._wire(target.rank)
        row_bytes, turned = 0, False
        if wire.by_rows and source.rows > 1:
            # Windows are equal on all ranks, so the own buffers describe a peer's.
            apart = any(box.cols < self.cols[box.buffer] for box in (source, target))
            row_bytes = source.cols * self.item[source.buffer] if apart else 0
        if wire.by_turns:
            turned = self.last.get(self.lane, target.rank) != target.rank
            self.last[self.lane] = target.rank
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


def _awaited(rank: int, part: GatedPart) -> list[Signal]:
    """Return the signals that a part of a gated launch waits for."""
    places = [part.word, *[term.word for term in part.terms if term is not None]]
    return [signal_at(rank, place) for place in dict.fromkeys(places) if place >= 0]


def simulated_target(machine: Machine, rank: int) -> Target:
    """Return the target of a rank of a machine."""
    if machine.engine == "host":
        return HOST
    if machine.engine == "cuda":
        return cuda_target(() if machine.signals == "write" else own_signals(rank))
    return hip_target(kernels=True, copies_2d=True)
