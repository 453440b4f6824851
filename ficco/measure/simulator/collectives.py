"""Predicting calls of a library: whole GEMMs and a collective, one after another.

Collectives take the measured time. If one was not measured, or the links need longer, its bytes
leave a rank at the link's highest rate: through the port of a switch, or through all links of a
mesh at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from ficco.core.dtypes import DTYPES
from ficco.core.machine import Machine
from ficco.measure.library_sums import calls_of_sums
from ficco.measure.simulator.calls import Calls
from ficco.measure.simulator.encoding import start_ns
from ficco.operators.problem import Problem
from ficco.plan import Plan, Region
from ficco.plan.timeline import Span
from ficco.program import Copy, Entry, Exchange, Experts, Launch, Program, kind_of
from ficco.program.passes import compile_plan
from ficco.program.target import LIBRARY


def spans_of(plan: Plan, machine: Machine, submitted: bool) -> list[Span]:
    """Return the spans of all ranks: one for each entry of their programs.

    A collective ends on all ranks at the same time; its duration counts from the last arrival.

    Args:
        plan: with transport "collective".
        machine: a rated machine.
        submitted: whether the host submits everything first (`host_serial_us`).
    """
    problem = plan.problem
    programs = [compile_plan(entry, LIBRARY) for entry in plan.ranks]
    host_us = machine.costs.host_serial_us if submitted else 0.0
    clocks = [
        _Clock(program, problem, machine, host_us + start_ns(program.rank, machine) / 1e3)
        for program in programs
    ]
    while exchanges := [exchange for clock in clocks if (exchange := clock.advance())]:
        bytes_out = max(_bytes_out(problem, rank, each) for rank, each in enumerate(exchanges))
        us = machine.collective_us(exchanges[0].collective, bytes_out, problem.world)
        end_us = max(clock.now_us for clock in clocks) + us
        for clock, exchange in zip(clocks, exchanges, strict=True):
            clock.end(exchange, end_us)
    return [span for clock in clocks for span in clock.spans]


class _Clock:
    """The time of one rank, and its spans so far.

    Attributes:
        now_us: when its last entry ended.
        spans: of the entries that have ended.
    """

    def __init__(self, program: Program, problem: Problem, machine: Machine, now_us: float) -> None:
        self._rank, self._left = program.rank, iter(program.entries)
        self._machine, self.now_us = machine, now_us
        self._calls = Calls(machine, problem.dtype)
        self._calls.use(program.buffers)
        self._item_bytes = problem.travelling_itemsize
        self.spans: list[Span] = []

    def advance(self) -> Exchange | None:
        """Run entries up to the next collective, and return it; None: no entry is left."""
        for entry in self._left:
            if isinstance(entry, Exchange):
                return entry
            self.end(entry, self.now_us + self._machine.costs.launch_us + self._us(entry))
        return None

    def end(self, entry: Entry, end_us: float) -> None:
        """End an entry that began when the last one ended."""
        kind = kind_of(entry)
        self.spans.append(Span(self._rank, entry.lane, entry.id, kind, "sm", self.now_us, end_us))
        self.now_us = end_us

    def _us(self, entry: Entry) -> float:
        if isinstance(entry, Copy):
            return self._calls.copied(entry.source.area * self._item_bytes) / 1e3
        assert isinstance(entry, Launch)
        us = self._calls.of(entry.work) / 1e3
        if isinstance(entry.work, Experts) and entry.work.adds_own:  # by PyTorch
            us += calls_of_sums(entry.work.sizes.topk) * self._machine.costs.launch_us
        return us


def _bytes_out(problem: Problem, rank: int, exchange: Exchange) -> float:
    """Return the bytes that leave a rank if each peer gets its part once (all-reduce: twice)."""
    reads, world = exchange.reads, problem.world
    if exchange.collective == "all_gather":
        return _bytes(problem, reads) * (world - 1)
    if exchange.collective == "reduce_scatter":  # uneven blocks are padded
        return (world - 1) * max(_bytes(problem, [region]) for region in reads)
    if exchange.collective == "all_reduce":
        return 2 * _bytes(problem, reads) * (world - 1) / world
    return _bytes(problem, [region for peer, region in enumerate(reads) if peer != rank])


def _bytes(problem: Problem, regions: Sequence[Region]) -> int:
    return sum(region.area for region in regions) * DTYPES[problem.dtype]
