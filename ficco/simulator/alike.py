"""Ranks that are alike: the rows of all ranks are derived from those of rank 0, which is faster.

If all ranks hold equal shards on one node, the plan of rank r is that of rank 0 with every peer
rotated by r. So only rank 0 is lowered and encoded. The rows of the others are its rows with other
numbers of signals, peers and lanes. The adjacency of a compute step's pieces also differs, because
the own block is at another place. These steps are rotated and encoded again, see `turning`. The
result equals that of `encode` except for the numbers of signals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ficco.lowering import lower_rank
from ficco.machine import Machine
from ficco.plan import Plan, RankPlan, Step, digest_of
from ficco.problem import Problem
from ficco.schedule import Schedule
from ficco.simulator.encoding import (
    ACTION,
    COPY,
    ROW,
    SIGNALS,
    Encoded,
    Encoder,
    start_ns,
)
from ficco.simulator.links import Wires
from ficco.simulator.turning import TURNED, Copies, Turn, is_within_blocks, shape_of

__all__ = ["are_alike", "encode_alike"]

Numbers = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def are_alike(problem: Problem, schedule: Schedule, machine: Machine) -> bool:
    """Return whether `encode_alike` supports a problem.

    All ranks must hold equal shards and have equal links; outputs are products along rows; copies
    are not a kernel's stores.
    """
    p = problem
    equal = [p.rows, p.depths, p.tables, p.lookups, [s for row in p.splits for s in row]]
    equal += [output.columns for output in p.outputs]
    paced = machine.engine == "host" and machine.pacing
    return (
        p.world > 2
        and all(len(set(values)) <= 1 for values in equal)
        and p.rows[0] > 0
        and all(output.axis == "rows" for output in p.outputs)
        and not p.pairs
        and schedule.transport == "dma"
        and (paced or p.world <= machine.devices)
    )


def encode_alike(
    problem: Problem, schedule: Schedule, machine: Machine, submitted: bool
) -> Encoded | None:
    """Return the result of `encode` for the plans of all ranks, without the signals.

    The arguments are those of `encode`, with problem and schedule in place of plans. Returns None
    if a part of a gated step spans rows of two ranks, so that ranks differ.

    Raises:
        ScheduleError: nothing implements the schedule.
    """
    entry = lower_rank(problem, schedule, 0)
    plan = Plan(problem, schedule, digest_of(problem, schedule), (entry,))
    encoder = Encoder(plan, machine, submitted)
    encoder.add(entry)
    block = problem.splits[0][0] if problem.splits else problem.rows[0]
    parts = [product for step in entry.steps for part in step.parts for product in part.products]
    if not is_within_blocks([region for p in parts for region in (p.a, p.c)], block):
        return None
    first = _First(encoder, entry, problem.world, block, schedule.sums == "within")
    ranks = range(problem.world)
    by_rank = [first.rank(rank) for rank in ranks]
    starts = np.array([start_ns(rank, machine) for rank in ranks])
    lanes = np.repeat(np.arange(problem.world), len(encoder.lanes))
    afters = [rank * first.number + np.array(encoder.afters, np.int64) for rank in ranks]
    tables = (
        lanes,
        starts,
        np.concatenate([rows for rows, _, _ in by_rank]),
        np.concatenate(afters),
        np.concatenate([actions for _, actions, _ in by_rank]),
        np.array(encoder.transfers, np.float64).reshape(-1, 3),
        np.concatenate([first.at_start + np.array((rank, 0)) for rank in ranks]),
    )
    return Encoded(tables, Wires(machine, problem.world).ports, [], [ns for _, _, ns in by_rank])


class _Changed(NamedTuple):
    """A step that differs between ranks: place, row, actions [begin, end), and shape number."""

    place: int
    row: int
    begin: int
    end: int
    shape: int


class _First:
    """The encoding of rank 0, from which those of the other ranks are derived.

    Args:
        encoder: the encoder that has added rank 0.
        entry: the plan of rank 0.
        world: number of ranks.
        block: rows that each rank holds.
        within: whether parts of a gated step wait for all peers, in the order of ranks.
    """

    def __init__(
        self, encoder: Encoder, entry: RankPlan, world: int, block: int, within: bool
    ) -> None:
        self.encoder, self.world, self.block = encoder, world, block
        self.heights = {buffer.name: buffer.rows for buffer in entry.buffers}
        self.rows: Numbers = np.array(encoder.rows).reshape(-1, ROW)
        self.actions: Numbers = np.array(encoder.actions).reshape(-1, ACTION)
        self.number = len(self.rows)
        self.ends = np.cumsum(self.rows[:, 3]).astype(np.int64)  # of each row's actions
        self.steps = entry.steps
        self.rows_of = np.array([len(step.parts) or 1 for step in entry.steps])  # by step
        self.changing = list(self._changing())
        self.known: dict[tuple[int, int], tuple[Numbers, float]] = {}  # by shape and rank
        self.moving: dict[int, Copies] = {}  # by shape
        self.waits = list(self._ordered_waits()) if within else []
        self._number_words()

    def rank(self, rank: int) -> tuple[Numbers, Numbers, float]:
        """Return the rows and actions of a rank, and its host's time."""
        actions = self.actions.copy()
        for begin, end in self.waits:
            actions[begin:end] = np.roll(actions[begin:end], rank, axis=0)
        used = actions[self.signals, 1].astype(np.int64)
        holders = (self.holders[used] + rank) % self.world
        actions[self.signals, 1] = holders * self.kinds + self.place_of[used]
        actions[self.copies, 1] = (actions[self.copies, 1] + rank) % self.world
        rows = self.rows.copy()
        rows[:, 0] += rank * len(self.encoder.lanes)
        costs = np.array(self.encoder.submitting)
        pieces, at = [], 0
        for changed in self.changing if rank else ():
            calls, costs[changed.place + 1] = self._calls(changed, rank)
            rows[changed.row, 3] = len(calls)
            pieces += [actions[at : changed.begin], calls]
            at = changed.end
        host_ns = np.cumsum(costs)  # in the order of the sums in `Encoder.add`
        if self.encoder.submitted:
            rows[:, 1] = np.repeat(host_ns[1:], self.rows_of)
        return rows, np.concatenate([*pieces, actions[at:]]), float(host_ns[-1])

    def _calls(self, changed: _Changed, rank: int) -> tuple[Numbers, float]:
        """Return the actions of a compute step on another rank, and the time of its host."""
        known = self.known.get((changed.shape, rank))
        if known is None:
            step, encoder = self.steps[changed.place], self.encoder
            encoder.actions = []
            if step.kind == "local_copy":
                if changed.shape not in self.moving:
                    copies = Copies(step, self.heights, self.block, encoder.item)
                    self.moving[changed.shape] = copies
                sizes = self.moving[changed.shape].of(rank)
                ns = encoder.called(step.kind, [encoder.calls.copied(size) for size in sizes])
            else:
                ns = encoder.compute(Turn(self.heights, self.block, rank).step(step))
            known = np.array(self.encoder.actions).reshape(-1, ACTION), ns
            self.known[changed.shape, rank] = known
        return known

    def _changing(self) -> Sequence[_Changed]:
        row, changing = 0, []
        numbers: dict[Any, int] = {}  # short keys for shapes, which are long
        for place, step in enumerate(self.steps):
            if self._depends(step):
                begin = int(self.ends[row] - self.rows[row, 3])
                shape = shape_of(step, self.block)
                number = numbers.setdefault(shape, len(numbers))
                changing.append(_Changed(place, row, begin, int(self.ends[row]), number))
            row += int(self.rows_of[place])
        return changing

    def _depends(self, step: Step) -> bool:
        """Return whether the calls of a step depend on the place of the own block."""
        if step.kind not in TURNED or step.parts:
            return False
        if len(step.products) + len(step.writes) > 1:
            return True
        regions = [*step.writes, *[r for p in step.products for r in (p.a, p.c)]]
        return not is_within_blocks(regions, self.block)

    def _ordered_waits(self) -> Sequence[tuple[int, int]]:
        """Return [begin, end) of the waits of parts that wait for all peers."""
        row, waits = 0, []
        for place, step in enumerate(self.steps):
            for number, part in enumerate(step.parts):
                begin = int(self.ends[row + number] - self.rows[row + number, 3])
                if len(part.waits) == self.world - 1:
                    waits.append((begin, begin + len(part.waits)))
            row += int(self.rows_of[place])
        return waits

    def _number_words(self) -> None:
        """Number the signals within each rank; a rank and that number identify a signal."""
        kinds: dict[Any, int] = {}
        places, holders, free = [], [], []
        for rank, name, peer, chunk, copy in self.encoder.signals:
            kind = ((peer - rank) % self.world, name, chunk, copy)
            if kind not in kinds:
                kinds[kind] = len(kinds)
                free.append(name == "free")
            places.append(kinds[kind])
            holders.append(rank)
        self.kinds = len(kinds)
        self.place_of = np.array(places, np.int64)
        self.holders = np.array(holders, np.int64)
        self.at_start: Integers = np.array([[0, is_free] for is_free in free], np.int64)
        acts = self.actions[:, 0]
        self.signals = np.flatnonzero(np.isin(acts, SIGNALS))
        self.copies = np.flatnonzero(acts == COPY)
