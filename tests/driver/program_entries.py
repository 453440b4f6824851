"""What the engine submits is the program, entry by entry: scenarios of engine_worker.py.

The double logs the work of every stream. Each lane's log must be that of its entries, in order, and
an entry that comes after one of another lane must come behind an event that is recorded behind that
one. The watchdog's words, which are outside of windows, are left out.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import double_control as control
from engine_node import Node, expert_problems, named, problems, refused

from ficco.core.errors import ScheduleError
from ficco.engine import cuda, gpu
from ficco.engine.window_layout import COPIES, WORDS_BYTES, Window
from ficco.operators.problem import Problem
from ficco.plan import Region, Signal, digest_of, signal_place
from ficco.plan.schedule import Schedule
from ficco.program import Copy, Entry, Gemm, Launch, SignalWrite, Wait, kernel_of

Lines = list[tuple[Any, ...]]


class Stream(NamedTuple):
    """The log of a stream.

    Attributes:
        lines: its work.
        records, awaits: number of lines before each event that it records, or waits for.
    """

    lines: Lines
    records: dict[str, int]
    awaits: list[tuple[str, int]]


# Programs for other targets than the double's own, each with one field changed.
TARGETS: dict[str, dict[str, Any]] = {
    "own": {},
    "rows by single copies": {"copies_2d": False},
    "streams store all signals": {"store_from": 0},
    "kernels store from one signal on": {"store_from": 1},
    "no batches": {"batches": False},
    "waits by kernels": {"wait": "kernel"},
    "waits by kernels, all else by copies of rows": {
        "wait": "kernel",
        "copies_2d": False,
        "store_from": 0,
        "writable": (False,) * 8,
    },
}


class Expected:
    """The lines of a bound program's entries, in a call with given arrays on a window copy."""

    def __init__(
        self, bound: gpu.BoundProgram, arrays: dict[str, Any], copy: int, digest: int
    ) -> None:
        self.bound, self.arrays, self.copy, self.digest = bound, arrays, copy, digest
        self.window: Window = bound._window

    def lanes(self) -> dict[str, Lines]:
        lanes: dict[str, Lines] = {}
        for entry in self.bound.program.entries:
            lanes.setdefault(entry.lane, []).extend(self.lines(entry))
        return lanes

    def lines(self, entry: Entry) -> Iterator[tuple[Any, ...]]:
        if isinstance(entry, Copy):
            yield ("copy", *self._box(entry.source, entry.target))
        elif isinstance(entry, Wait) and entry.how == "kernel":
            yield ("kernel_wait", *[(self._word(s), self._value(s)) for s in entry.signals])
        elif isinstance(entry, Wait):
            for signal in entry.signals:
                yield ("wait", self._word(signal), self._value(signal))
        elif isinstance(entry, Launch):
            yield ("host",)  # its name is in `names`
        else:
            yield from self._written(entry)

    def _written(self, entry: SignalWrite) -> Iterator[tuple[Any, ...]]:
        values = [(self._word(s), 0) for s in entry.clears]
        values += [(self._word(s), self._value(s)) for s in entry.raises]
        if entry.how == "kernel":
            yield ("store", *values)
        for word, value in values if entry.how == "stream" else ():
            yield ("write", word, value)
        for word, value in values if entry.how == "copy" else ():
            yield ("copy", word, value, 1, 4)

    def _word(self, signal: Signal) -> int:
        words = self.window.words[self.copy ^ signal.copy][signal.rank]
        return words + 4 * signal_place(signal)

    def _value(self, signal: Signal) -> int:
        return self.digest if signal.name == "entered" else 1

    def _box(self, source: Region, target: Region) -> tuple[int, int, int, int]:
        """Return addresses of target and source, rows and bytes of a row, as the driver gets them.

        Workspaces are allocated in the call: their address is 0.
        """
        (begin, tight_source, _), (to, tight, item) = self._place(source), self._place(target)
        rows, row_bytes = target.rows, target.cols * item
        whole = rows == 1 or (tight_source == row_bytes and tight == row_bytes)
        return (to, begin, 1, rows * row_bytes) if whole else (to, begin, rows, row_bytes)

    def names(self) -> list[str]:
        """Return the library's or the stand-in kernel's name of every launch, in order."""
        return [_name(launch) for launch in self.bound.program.launches]

    def _place(self, region: Region) -> tuple[int, int, int]:
        """Return a region's address, its pitch, and the bytes of an element."""
        buffer = self.bound._buffers[region.buffer]
        item = 4 if buffer.dtype == "float32" else 2
        array = self.arrays.get(region.buffer)
        if buffer.role == "workspace":
            return 0, buffer.cols * item, item  # allocated in the call; only peers' are compared
        if array is not None:
            base, pitch = array.ctypes.data, array.strides[0]
        else:
            pitch = buffer.cols * item
            base = self.window.data[self.copy ^ region.copy][region.rank]
            base += self.bound._places[region.buffer]
        return base + region.row0 * pitch + region.col0 * item, pitch, item


def _name(launch: Launch) -> str:
    if isinstance(launch.work, Gemm):
        return "gemms" if launch.work.number > 1 else "gemm"
    name = kernel_of(launch.work)
    return {"gated_gemm": "gated"}.get(name, name)


def logged(windows: Window) -> list[Stream]:
    """Return the log of every stream that did something, without words outside of windows."""
    inside = [(base, base + COPIES * WORDS_BYTES) for base in windows.words[0]]

    def known(address: int) -> bool:
        return any(first <= address < past for first, past in inside)

    streams = []
    for lines in control.recorded().values():
        found = Stream([], {}, [])
        for line in lines:
            kind, *rest = line.split()
            if kind == "record":
                found.records[rest[0]] = len(found.lines)
            elif kind == "await":
                found.awaits.append((rest[0], len(found.lines)))
            elif kind == "copy":
                to, begin, rows, row_bytes = map(int, rest)
                if (rows, row_bytes) == (1, 4) and known(to):
                    begin = ctypes.c_uint32.from_address(begin).value  # of the constant
                found.lines.append(("copy", to, begin, rows, row_bytes))
            elif kind in ("store", "kernel_wait"):
                pairs = [tuple(map(int, pair.split("="))) for pair in rest]
                found.lines.append((kind, *[pair for pair in pairs if known(pair[0])]))
            elif kind == "host":
                found.lines.append(("host",))
            else:
                for operation in line.split("; "):
                    kind, address, value = operation.split()
                    if known(int(address)):
                        found.lines.append((kind, int(address), int(value)))
        if found.lines:
            streams.append(found)
    return streams


def check_order(expected: Expected, streams: dict[str, Stream]) -> int:
    """Hold a program's `after` against the events of its lanes' streams; return how many cross."""
    end: dict[str, tuple[str, int]] = {}  # of entries: lane, and lines of the lane until then
    lines, crossing = dict.fromkeys(streams, 0), 0
    for entry in expected.bound.program.entries:
        begin = lines[entry.lane]
        for lane, past in (end[name] for name in entry.after):
            if lane == entry.lane:
                continue
            crossing += 1
            records = streams[lane].records
            awaits = streams[entry.lane].awaits
            assert any(at <= begin and records.get(event, -1) >= past for event, at in awaits), (
                f"{entry.id} does not wait for {entry.after}"
            )
        lines[entry.lane] += len(list(expected.lines(entry)))
        end[entry.id] = entry.lane, lines[entry.lane]
    return crossing


def check(node: Node, problem: Problem, schedule: Schedule) -> int:
    """Run a call, and hold the log of its streams against the programs' lanes.

    Returns how many entries come after one of another lane.
    """
    arrays, exact = node.arrays(problem, 3)
    node.execute(problem, schedule, arrays)  # binds it
    node.runtime.synchronize()
    copy = node.runtime._calls % COPIES
    called: dict[int, list[str]] = {stream: [] for stream in node.streams.values()}

    def note(name: str) -> None:
        called[node.compute.stream()].append(name)

    node.compute.on_call = note
    control.record(True)
    node.execute(problem, schedule, arrays)
    node.runtime.synchronize()
    control.record(False)
    node.compute.on_call = lambda name: None
    node.judge(problem, arrays, exact, schedule.name, 9)
    bound, about = node.runtime._recent[-1].ranks, f"{problem.op} {schedule.name}"
    digest = digest_of(problem, schedule)
    ranks = [Expected(plan, arrays[rank], copy, digest) for rank, plan in enumerate(bound)]
    lanes = {
        (rank, lane): lines
        for rank, expected in enumerate(ranks)
        for lane, lines in expected.lanes().items()
        if lines
    }
    copies = [line for lines in lanes.values() for line in lines if line[0] == "copy"]
    known = {place for line in copies for place in line[1:3]}

    def without_workspaces(lines: Lines) -> Lines:
        return [
            (*line[:1], *[p if p in known else 0 for p in line[1:3]], *line[3:])
            if line[0] == "copy" else line for line in lines
        ]  # fmt: skip

    streams = sorted(logged(bound[0]._window), key=lambda s: without_workspaces(s.lines))
    order = sorted(lanes, key=lambda lane: without_workspaces(lanes[lane]))
    assert len(streams) == len(lanes), f"{about}: {len(streams)} streams, {len(lanes)} lanes"
    for lane, stream in zip(order, streams, strict=True):
        mine, theirs = without_workspaces(stream.lines), without_workspaces(lanes[lane])
        assert mine == theirs, f"{about}: submitted {mine}, the program has {theirs}"
    of = dict(zip(order, streams, strict=True))
    crossing = 0
    for rank, expected in enumerate(ranks):
        names = called[node.streams[rank]]
        assert names == expected.names(), f"{about}, rank {rank}: {names}"
        own = {lane: stream for (r, lane), stream in of.items() if r == rank}
        crossing += check_order(expected, own)
    return crossing


def compile_for(target: str) -> None:
    """Let the engine compile programs for one of TARGETS from now on."""
    own, fields = cuda.target_of, TARGETS[target]
    cuda.target_of = lambda *args: own(*args)._replace(**fields)  # type: ignore[assignment]


def entries(world: int, target: str) -> None:
    """Every operator and schedule, compiled for a target."""
    compile_for(target)
    node, count, crossing = Node(world), 0, 0
    if "copies_2d" in TARGETS[target]:
        node.apart = 0  # others are packed first, by calls that are no entries
    for problem in problems(world, "bfloat16", random.Random(world), 20):
        for name in Schedule.names(problem.op):
            if refused(problem, name):
                continue
            try:
                crossing += check(node, problem, named(name, world))
            except ScheduleError:
                continue
            count += 1
    for problem in expert_problems(world, "bfloat16"):
        for name in Schedule.names(problem.op):
            check(node, problem, named(name, world))
    assert count > 20 and crossing > 20, (count, crossing)
    node.runtime.close()
