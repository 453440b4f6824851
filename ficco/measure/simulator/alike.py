"""Ranks that are alike: the rows of all ranks are derived from those of rank 0, which is faster.

If all ranks hold equal shards on one node, the plan of rank r is that of rank 0 with every peer
rotated by r. So only rank 0 is lowered, compiled and encoded. The rows of the others are its rows
with other numbers of signals, peers and lanes. The adjacency of a compute step's pieces also
differs, because the own block is at another place. These steps are rotated, compiled and encoded
again, see `Turn`. The result equals that of `encode` except for the numbers of signals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ficco.core.machine import Machine
from ficco.lowering import lower_rank
from ficco.measure.simulator.encoding import (
    ACTION,
    COPY,
    ROW,
    SIGNALS,
    Encoded,
    Encoder,
    simulated_target,
    start_ns,
)
from ficco.measure.simulator.links import Wires
from ficco.operators.problem import Problem
from ficco.plan import Product, RankPlan, Region, Step, bags_of
from ficco.plan.schedule import Schedule
from ficco.program import Entry
from ficco.program.passes import compile_by_step
from ficco.program.target import Target

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
        and not p.flow.routes  # their steps read all ranks' tokens
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
    block = problem.splits[0][0] if problem.splits else problem.rows[0]
    parts = [product for step in entry.steps for part in step.parts for product in part.products]
    if not is_within_blocks([region for p in parts for region in (p.a, p.c)], block):
        return None
    first = _First(Encoder(problem, machine, submitted), entry, simulated_target(machine, 0), block)
    ranks = range(problem.world)
    by_rank = [first.rank(rank) for rank in ranks]
    begins = np.cumsum([0, *[len(one.rows) for one in by_rank]])
    tables = (
        np.repeat(np.arange(problem.world), len(first.encoder.lanes)),
        np.array([start_ns(rank, machine) for rank in ranks]),
        np.concatenate([one.rows for one in by_rank]),
        np.concatenate([one.afters + begin for one, begin in zip(by_rank, begins, strict=False)]),
        np.concatenate([one.actions for one in by_rank]),
        np.array(first.encoder.transfers, np.float64).reshape(-1, 3),
        np.concatenate([first.at_start + np.array((rank, 0)) for rank in ranks]),
    )
    ports = Wires(machine, problem.world).ports
    return Encoded(tables, ports, [], [one.host_ns for one in by_rank])


class _Rank(NamedTuple):
    """The rows, afters, actions and host's time of a rank; afters count from its first row."""

    rows: Numbers
    afters: Integers
    actions: Numbers
    host_ns: float


class _Rows(NamedTuple):
    """The rows of a step that differs between ranks: number of actions and host's time of each."""

    counts: list[int]
    actions: Numbers
    costs: list[float]


class _Changing(NamedTuple):
    """A step that differs between ranks: its place in the plan, and the number of its shape."""

    place: int
    shape: int


class _First:
    """The encoding of rank 0, from which those of the other ranks are derived.

    Args:
        encoder: without ranks yet.
        plan: of rank 0.
        target: of rank 0.
        block: rows that each rank holds.
    """

    def __init__(self, encoder: Encoder, plan: RankPlan, target: Target, block: int) -> None:
        self.encoder, self.plan, self.target, self.block = encoder, plan, target, block
        self.world = encoder.world
        self.heights = {buffer.name: buffer.rows for buffer in plan.buffers}
        self.after_steps: list[int] = []  # for each `after` of an entry, the step that it waits for
        self.row_ends, self.action_ends = self._encoded()  # of each step
        self.rows: Numbers = np.array(encoder.rows).reshape(-1, ROW)
        self.actions: Numbers = np.array(encoder.actions).reshape(-1, ACTION)
        self.costs = np.array(encoder.costs)
        self.summed = [waits for waits in encoder.summed if waits[1] - waits[0] == self.world - 1]
        self.changing = list(self._changing())
        self.known: dict[tuple[int, int], _Rows] = {}  # by shape and rank
        self.moving: dict[int, Copies] = {}  # by shape
        self._number_signals()

    def _encoded(self) -> tuple[Integers, Integers]:
        """Encode rank 0; return the ends of the rows and of the actions of each step."""
        encoder = self.encoder
        by_step = compile_by_step(self.plan, self.target)
        encoder.begin(0, self.plan.buffers, [entry for made in by_step for entry in made])
        step_of: dict[str, int] = {}
        rows, actions = [], []
        for index, made in enumerate(by_step):
            for entry in made:
                self.after_steps += [step_of[name] for name in entry.after]
                encoder.add_entry(entry)
                step_of[entry.id] = index
            rows.append(len(encoder.rows) // ROW)
            actions.append(len(encoder.actions) // ACTION)
        return np.array(rows, np.int64), np.array(actions, np.int64)

    def rank(self, rank: int) -> _Rank:
        """Return a rank's rows, its actions, and its host's time."""
        actions = self.actions.copy()
        for begin, end in self.summed:
            actions[begin:end] = np.roll(actions[begin:end], rank, axis=0)
        used = actions[self.signals, 1].astype(np.int64)
        holders = (self.holders[used] + rank) % self.world
        actions[self.signals, 1] = holders * self.kinds + self.place_of[used]
        actions[self.copies, 1] = (actions[self.copies, 1] + rank) % self.world
        rows, actions, costs, ends = self._with_turned(rank, actions)
        rows[:, 0] += rank * len(self.encoder.lanes)
        host_ns = np.cumsum(costs)  # in the order of the sums in `Encoder`
        if self.encoder.submitted:
            rows[:, 1] = host_ns[1:]
        afters = ends[np.array(self.after_steps, np.int64)] - 1
        return _Rank(rows, afters, actions, float(host_ns[-1]))

    def _with_turned(
        self, rank: int, actions: Numbers
    ) -> tuple[Numbers, Numbers, Numbers, Integers]:
        """Return rows, actions, host's times, and the ends of each step's rows, of a rank."""
        if not rank or not self.changing:
            return self.rows.copy(), actions, self.costs, self.row_ends
        rows, acts, costs = [], [], [self.costs[:1]]
        counts = np.diff(self.row_ends, prepend=0)
        row_at = action_at = 0
        for changing in self.changing:
            index, turned = changing.place, self._turned(changing, rank)
            row, row_end = self.row_ends[index] - counts[index], self.row_ends[index]
            action = self.action_ends[index - 1] if index else 0
            block = np.zeros((len(turned.counts), ROW))
            block[:, 0] = self.rows[row, 0]
            block[0, 2] = self.rows[row, 2]
            block[:, 3] = turned.counts
            rows += [self.rows[row_at:row], block]
            acts += [actions[action_at:action], turned.actions]
            costs += [self.costs[row_at + 1 : row + 1], np.array(turned.costs)]
            row_at, action_at = row_end, self.action_ends[index]
        counts[[changing.place for changing in self.changing]] = [
            len(self._turned(changing, rank).counts) for changing in self.changing
        ]
        return (
            np.concatenate([*rows, self.rows[row_at:]]),
            np.concatenate([*acts, actions[action_at:]]),
            np.concatenate([*costs, self.costs[row_at + 1 :]]),
            np.cumsum(counts),
        )

    def _turned(self, changing: _Changing, rank: int) -> _Rows:
        """Return the rows of a step on another rank."""
        known = self.known.get((changing.shape, rank))
        if known is None:
            step = self.plan.steps[changing.place]
            if step.kind == "local_copy":
                known = self._copied(step, changing.shape, rank)
            else:
                turned = Turn(self.heights, self.block, rank).step(step)
                alone = self.plan._replace(steps=(turned._replace(after=()),))
                (made,) = compile_by_step(alone, self.target)
                known = self._launched(made)
            self.known[changing.shape, rank] = known
        return known

    def _launched(self, made: Sequence[Entry]) -> _Rows:
        """Return the rows of entries."""
        encoder = self.encoder
        encoder.rows, encoder.actions, encoder.costs = [], [], []
        for entry in made:
            encoder.add_entry(entry)
        return self._taken()

    def _copied(self, step: Step, shape: int, rank: int) -> _Rows:
        """Return the rows of a local copy."""
        if shape not in self.moving:
            self.moving[shape] = Copies(step, self.heights, self.block, self.encoder.item)
        encoder = self.encoder
        encoder.rows, encoder.actions, encoder.costs = [], [], []
        for size in self.moving[shape].of(rank):
            encoder.add_local_copy(size, step.lane)
        return self._taken()

    def _taken(self) -> _Rows:
        encoder = self.encoder
        counts = [int(number) for number in encoder.rows[3::ROW]]
        return _Rows(counts, np.array(encoder.actions).reshape(-1, ACTION), encoder.costs)

    def _changing(self) -> Sequence[_Changing]:
        changing = []
        numbers: dict[Any, int] = {}  # short keys for shapes, which are long
        begins = np.concatenate([[0], self.row_ends[:-1]])
        for index, step in enumerate(self.plan.steps):
            if begins[index] < self.row_ends[index] and self._depends(step):
                number = numbers.setdefault(shape_of(step, self.block), len(numbers))
                changing.append(_Changing(index, number))
        return changing

    def _depends(self, step: Step) -> bool:
        """Return whether the calls of a step depend on the place of the own block."""
        if step.kind not in TURNED or step.parts:
            return False
        if len(step.products) + len(step.writes) > 1:
            return True
        regions = [*step.writes, *[r for p in step.products for r in (p.a, p.c)]]
        return not is_within_blocks(regions, self.block)

    def _number_signals(self) -> None:
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


# ---- turning: a compute step of another rank from that of rank 0
#
# Buffers with a block per rank are rotated by as many blocks. Lowerings sort the pieces of a step
# by rows and join adjacent ones. So rotated pieces are cut at a buffer's end, sorted and joined
# again. Only the sizes of the result and the adjacency of its pieces are meaningful here.

TURNED = ("gemm", "local_copy", "bag")  # kinds whose calls depend on the adjacency of pieces

Boxes = tuple[Region, ...]  # regions whose rows correspond, and which are cut alike


class Turn(NamedTuple):
    """A rotation of buffers.

    Attributes:
        heights: rows of each buffer.
        block: rows that each rank holds.
        rank: the rank whose step is derived from that of rank 0.
    """

    heights: Mapping[str, int]
    block: int
    rank: int

    def step(self, step: Step) -> Step:
        """Return the rank's version of a GEMM or a step that pools bags."""
        if step.kind == "gemm":
            return step._replace(products=self._products(step.products))
        return self._bag(step)

    def _products(self, products: tuple[Product, ...]) -> tuple[Product, ...]:
        groups: dict[Any, list[Boxes]] = {}
        for product in products:
            a, b, c, accumulate, add = product
            like = (a.buffer, a[4:6], b, c.buffer, c[4:6], accumulate, add)
            groups.setdefault(like, []).extend(self._cut((a, c)))
        return tuple(
            Product(a, like[2], c, *like[5:])
            for like, pieces in groups.items()
            for a, c in _joined(pieces)
        )

    def _bag(self, step: Step) -> Step:
        groups: dict[str, dict[int, list[Boxes]]] = {}  # by target, and number of the table
        bags = bags_of(step)
        tables = len({bag.table.buffer for bag in bags})
        for number, target in enumerate(step.writes):
            pieces = groups.setdefault(target.buffer, {}).setdefault(number % tables, [])
            pieces.extend(self._cut((target,)))
        reads: list[Region] = []
        writes: list[Region] = []
        modes: list[str] = []
        for group in groups.values():
            for piece in zip(*[_joined(pieces) for pieces in group.values()], strict=True):
                for number, (target,) in zip(group, piece, strict=True):
                    bag = bags[number]
                    reads += [bag.table, bag.indices, bag.bags._replace(col0=0, col1=target.rows)]
                    reads += [] if bag.weights is None else [bag.weights]
                    writes.append(target)
                    modes += step.modes[number : number + 1]
        return step._replace(reads=tuple(reads), writes=tuple(writes), modes=tuple(modes))

    def _cut(self, boxes: Boxes) -> list[Boxes]:
        """Rotate boxes of equal height, and cut all where one would cross its buffer's end."""
        rows, by = boxes[0].rows, self.rank * self.block
        if not rows:
            return [boxes]
        turned = []
        for rank, buffer, row0, _, col0, col1, copy, _ in boxes:
            top = (row0 + by) % self.heights[buffer]
            turned.append(Region(rank, buffer, top, top + rows, col0, col1, copy))
        passed = {self.heights[box.buffer] - box.row0 for box in turned}
        cuts = [0, *sorted([edge for edge in passed if edge < rows]), rows]
        if len(cuts) == 2:
            return [tuple(turned)]
        return [
            tuple(self._piece(box, low, high) for box in turned) for low, high in pairwise(cuts)
        ]

    def _piece(self, box: Region, low: int, high: int) -> Region:
        """Return rows [low, high) of a box, all before or all after its buffer's end."""
        top = (box.row0 + low) % self.heights[box.buffer]
        return box._replace(row0=top, row1=top + high - low)


class Copies:
    """The pieces of a local copy; no rotated piece crosses the end of its buffer.

    Args:
        step: the step of rank 0.
        heights, block: as in `Turn`.
        item: bytes of an element, by buffer.
    """

    def __init__(
        self, step: Step, heights: Mapping[str, int], block: int, item: Mapping[str, int]
    ) -> None:
        names = {name: number for number, name in enumerate(sorted(heights))}
        self.block = block
        pairs = [pair for pair in zip(step.reads, step.writes, strict=True) if pair[0].area]
        self.sides = [
            np.array(
                [(names[box.buffer], *box[2:6], heights[box.buffer]) for box in boxes], np.int64
            ).reshape(-1, 6)
            for boxes in zip(*pairs, strict=True)
        ]
        self.sizes = np.array([pair[0].area * item[pair[0].buffer] for pair in pairs], np.int64)

    def of(self, rank: int) -> list[int]:
        """Return the bytes of each copy on a rank, joined as by `ficco.program.passes.copies`."""
        turned = []
        for buffer, row0, row1, col0, col1, height in [side.T for side in self.sides]:
            top = (row0 + rank * self.block) % height
            turned.append((buffer, top, top + row1 - row0, col0, col1))
        source = turned[0]
        order = np.lexsort((source[1], source[0]))  # stable
        adjacent = np.ones(max(len(order) - 1, 0), np.bool_)
        for buffer, top, bottom, col0, col1 in [[v[order] for v in side] for side in turned]:
            adjacent &= bottom[:-1] == top[1:]
            for values in (buffer, col0, col1):
                adjacent &= values[:-1] == values[1:]
        firsts = np.flatnonzero(np.concatenate([[True], ~adjacent]))
        sizes: list[int] = np.add.reduceat(self.sizes[order], firsts).tolist()
        return sizes


def _joined(pieces: list[Boxes]) -> list[Boxes]:
    """Return pieces from top to bottom; pieces that are adjacent in all boxes are joined."""
    joined: list[Boxes] = []
    for piece in sorted(pieces, key=_top):
        if joined and all(
            above.row1 == below.row0 for above, below in zip(joined[-1], piece, strict=True)
        ):
            joined[-1] = tuple(
                above._replace(row1=below.row1)
                for above, below in zip(joined[-1], piece, strict=True)
            )
        else:
            joined.append(piece)
    return joined


def _top(piece: Boxes) -> int:
    return piece[0][2]


def is_within_blocks(regions: list[Region], block: int) -> bool:
    """Return whether no region spans rows of two ranks."""
    return all(region.row0 % block + region.rows <= block for region in regions)


def shape_of(step: Step, block: int) -> Any:
    """Return a key that is equal for steps whose calls are equal on every rank.

    The steps may be at other places in the blocks, like the chunks of a shard.
    """
    rows = [*step.reads, *step.writes] if step.kind == "local_copy" else [*step.writes]
    rows += [region for product in step.products for region in (product.a, product.c)]
    within = is_within_blocks(rows, block)

    def moved(region: Region, first: Region) -> Region:
        by = first.row0 % block if within else 0
        return region._replace(row0=region.row0 - by, row1=region.row1 - by)

    if step.products:
        a, c = step.products[0].a, step.products[0].c
        return step.kind, *[
            product._replace(a=moved(product.a, a), c=moved(product.c, c))
            for product in step.products
        ]
    reads = [moved(region, step.reads[0]) for region in step.reads]
    if step.kind == "bag":
        reads = [region._replace(col0=0, col1=region.cols) for region in step.reads]
    writes = [moved(region, step.writes[0]) for region in step.writes]
    return step.kind, *reads, *writes
