"""Direct: matmul_all_reduce by stores of the kernel that multiplies, for products of few rows.

One lane, for one kernel runs all of it (`ficco.kernels.one_kernel_all_reduce`), or all but the
product of many rows (`is_made_before`); chunks are slices of columns, over all rows, and lie behind
one another in order. Copies are stores: unit "sm". With three ranks:

    two shots   enter | make 0, store at the owners, make 1, ... | [entered]
                | [products] sum 0, store at all peers, ... | [sums] move 0, ... | clear
    one shot    enter | make 0, store at all peers, make 1, ... | [entered]
                | [products] sum 0, ... | clear

All products are rounded to the dtype, the own ones too, and lie in a mailbox with a slot for every
rank, so that ranks that add up the same products come to the same bits. A row's bias is that of the
rank it belongs to: with one shot it is added to that rank's products of the row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ficco.errors import ScheduleError
from ficco.lowering.handshake import await_entered
from ficco.lowering.one_kernel import Slice, check_axes, closed, opened, slices, stored
from ficco.lowering.producing import COMPUTE, PARTIAL, Piece, Products
from ficco.lowering.scattering import RECV
from ficco.lowering.single import alone
from ficco.plan import Buffer, RankPlan, Region, Signal, Step
from ficco.problem import Problem, offsets
from ficco.schedule import MAX_CHUNKS, Schedule

__all__ = ["REDUCED", "is_made_before", "lower_one_kernel_all_reduce"]

REDUCED = "reduced"  # mailbox: the peers' sums
_MOST_MADE = 64  # rows that the kernel multiplies as quickly as the library for GEMMs does


def is_made_before(rows: int, twice: bool) -> bool:
    """Whether on GPUs the library for GEMMs multiplies so many rows, before the one launch.

    All at once, into y, of which the launch sends each chunk in its turn. What a plan says of data
    and signals is the same, and so are results but for the order in which products add up. Not with
    one shot, which adds the bias to products: they would be rounded twice.
    """
    return twice and rows > _MOST_MADE


def lower_one_kernel_all_reduce(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering`."""
    _check(schedule)
    if most := max(map(len, problem.pairs), default=1) - 1:
        raise ScheduleError(
            f"matmul_all_reduce: transport='sm' multiplies one pair of x and w a rank; {1 + most} "
            "found; the nearest that works is transport='dma'"
        )
    products = Products(problem, rank)
    if problem.world == 1:
        return alone(problem, products)
    return _OneKernel(problem, schedule, rank, products).plan()


def _check(schedule: Schedule) -> None:
    check_axes(schedule)
    most = MAX_CHUNKS // 2 if schedule.shots == "two" else MAX_CHUNKS
    if schedule.chunks > most:
        raise ScheduleError(
            f"grain={schedule.chunks} with transport='sm' and shots={schedule.shots!r}; grain is "
            f"at most {most}, for every chunk has a signal"
            f"{' for its products and one for its sums' if schedule.shots == 'two' else ''}"
        )


@dataclass
class _OneKernel:
    """Steps under construction, of one rank."""

    problem: Problem
    schedule: Schedule
    rank: int
    products: Products
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        problem = self.problem
        world, rank, rows = problem.world, self.rank, problem.rows
        self.twice = self.schedule.shots == "two"
        self.first = offsets(rows)
        self.peers = [(rank + turn) % world for turn in range(1, world)]
        self.owners = [peer for peer in self.peers if rows[peer]]
        self.targets = self.owners if self.twice else self.peers
        self.slot = max(rows) if self.twice else problem.m
        self.slices = slices(problem.n, self.schedule.chunks)
        # Rows that this rank adds up.
        self.top = self.first[rank] if self.twice else 0
        self.bottom = self.top + rows[rank] if self.twice else problem.m

    def plan(self) -> RankPlan:
        """Return the plan."""
        rank, peers = self.rank, self.peers
        self.steps += opened(rank, peers, mailbox=True)
        for each in self.slices:
            self._make(each)
        self.steps.append(await_entered(rank, peers, COMPUTE))
        heard: list[Signal] = []
        if self.top < self.bottom:
            for each in self.slices:
                heard += self._add_up(each)
        if self.twice and self.owners:
            for each in self.slices:
                heard += self._collect(each)
        self.steps += closed(rank, peers, heard, mailbox=True)
        return RankPlan(rank, self._buffers(), tuple(self.steps))

    def _box(self, buffer: str, top: int, bottom: int, each: Slice, rank: int = -1) -> Region:
        at = self.rank if rank < 0 else rank
        return Region(at, buffer, top, bottom, each.begin, each.end)

    def _arrived(self, source: int, each: Slice, rank: int = -1) -> Region:
        """Return where the products of a source lie that this rank, or another, adds up."""
        at = self.rank if rank < 0 else rank
        top = source * self.slot
        rows = self.problem.rows[at] if self.twice else self.problem.m
        return self._box(RECV, top, top + rows, each, at)

    def _make(self, each: Slice) -> None:
        """Multiply, and store what others add up with them."""
        rank, first, m = self.rank, self.first, self.problem.m
        begin, end = first[rank], first[rank + 1]
        pieces: list[Piece] = []
        for top, bottom in ((0, begin), (begin, end), (end, m)):
            if top == bottom:
                continue
            mine = top == begin and bottom == end
            if self.twice:
                target = self._box(PARTIAL, top, bottom, each)
                target = self._arrived(rank, each) if mine else target
            else:
                slot = rank * self.slot
                target = self._box(RECV, slot + top, slot + bottom, each)
            add = self._bias(each) if mine and not self.twice else ()
            pieces.append(Piece(top, bottom, each.begin, each.end, target, add))
        if not self.twice and not self.problem.outputs[0].bias:
            pieces = [Piece(0, m, each.begin, each.end, self._arrived(rank, each))]
        self.steps += self.products.steps(str(each.number), pieces)
        if self.targets:
            sent = [self._part(peer, each) for peer in self.targets]
            there = [self._arrived(rank, each, p) for p in self.targets]
            name, number = f"{each.number}", each.number
            self.steps += stored(rank, name, sent, there, self.targets, number)

    def _part(self, peer: int, each: Slice) -> Region:
        """Return the products that a peer adds up."""
        if not self.twice:
            return self._arrived(self.rank, each)
        return self._box(PARTIAL, self.first[peer], self.first[peer + 1], each)

    def _bias(self, each: Slice) -> tuple[Region, ...]:
        return (self._box("bias0", 0, 1, each),) if self.problem.outputs[0].bias else ()

    def _add_up(self, each: Slice) -> tuple[Signal, ...]:
        """Await the peers' products, add them up, and pass the sums on; return the signals."""
        signals = tuple([Signal(self.rank, "data", peer, each.number) for peer in self.peers])
        terms = tuple([self._arrived(source, each) for source in range(self.problem.world)])
        terms += self._bias(each) if self.twice else ()
        sums = self._box("y0", self.top, self.bottom, each)
        self.steps += [
            Step(f"wait.{each.number}", COMPUTE, "wait", "none", signals=signals),
            Step(f"sum.{each.number}", COMPUTE, "reduce", "sm", terms, (sums,)),
        ]
        if self.twice:
            there = [self._box(REDUCED, self.top, self.bottom, each, p) for p in self.peers]
            signal = self.schedule.chunks + each.number
            name, sent = f"sum{each.number}", [sums] * len(there)
            self.steps += stored(self.rank, name, sent, there, self.peers, signal)
        return signals

    def _collect(self, each: Slice) -> tuple[Signal, ...]:
        """Await the owners' sums and move them into the output; return the signals."""
        index = self.schedule.chunks + each.number
        signals = tuple([Signal(self.rank, "data", peer, index) for peer in self.owners])
        spans = [(0, self.top), (self.bottom, self.problem.m)]
        spans = [(top, bottom) for top, bottom in spans if top < bottom]
        reads = tuple([self._box(REDUCED, top, bottom, each) for top, bottom in spans])
        writes = tuple([self._box("y0", top, bottom, each) for top, bottom in spans])
        name = f"sum{each.number}"
        self.steps += [
            Step(f"wait.{name}", COMPUTE, "wait", "none", signals=signals),
            Step(f"move.{name}", COMPUTE, "local_copy", "sm", reads, writes),
        ]
        return signals

    def _buffers(self) -> tuple[Buffer, ...]:
        m, n, dtype = self.problem.m, self.problem.n, self.problem.dtype
        world = self.problem.world
        found = [*self.products.operands(), Buffer("y0", "output", m, n, dtype)]
        found.append(Buffer(RECV, "mailbox", world * self.slot, n, dtype, copies=2))
        if self.twice:
            found.append(Buffer(REDUCED, "mailbox", m, n, dtype, copies=2))
            found.append(Buffer(PARTIAL, "workspace", m, n, dtype))
        return tuple(found)
