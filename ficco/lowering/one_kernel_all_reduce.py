"""matmul_all_reduce by stores of the kernel that multiplies, for products of few rows.

The plan has one lane, because one kernel runs all of it (`ficco.kernels.one_kernel_all_reduce`), or
all but a product of many rows (`is_made_before`). Chunks are slices of columns, over all rows, in
order. Copies are stores: unit "sm". With three ranks:

    two shots   enter | make 0, store at the owners, make 1, ... | [entered]
                | [products] sum 0, store at all peers, ... | [sums] move 0, ... | clear
    one shot    enter | make 0, store at all peers, make 1, ... | [entered]
                | [products] sum 0, ... | clear

All products, also the own ones, are rounded to the dtype and stored in a mailbox with a slot for
every rank, so that ranks that add up the same products get the same bits. A row uses the bias of
the rank that owns it: with one shot that rank adds its bias to its products of the row.
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
_MOST_ROWS = 64  # up to this many rows the kernel multiplies as fast as the GEMM library


def is_made_before(rows: int, twice: bool) -> bool:
    """Return whether on GPUs the GEMM library multiplies `rows` rows before the one launch.

    It makes all products at once, in y, and the launch then sends y chunk by chunk. The plan's data
    and signals stay the same, and so do results but for the order in which products add up. With
    one shot this does not apply: the bias is added to products, which would be rounded twice.
    """
    return twice and rows > _MOST_ROWS


def lower_one_kernel_all_reduce(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering`."""
    _check(schedule)
    if (pairs := max(map(len, problem.pairs), default=1)) > 1:
        raise ScheduleError(
            f"matmul_all_reduce: transport='sm' multiplies one pair of x and w a rank; {pairs} "
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
            f"at most {most}: every chunk has a signal"
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
        # The rows that this rank adds up are [top, bottom).
        self.top = self.first[rank] if self.twice else 0
        self.bottom = self.top + rows[rank] if self.twice else problem.m

    def plan(self) -> RankPlan:
        """Return the plan."""
        rank, peers = self.rank, self.peers
        self.steps += opened(rank, peers, mailbox=True)
        for columns in self.slices:
            self._make(columns)
        self.steps.append(await_entered(rank, peers, COMPUTE))
        received: list[Signal] = []
        if self.top < self.bottom:
            for columns in self.slices:
                received += self._add_up(columns)
        if self.twice and self.owners:
            for columns in self.slices:
                received += self._collect(columns)
        self.steps += closed(rank, peers, received, mailbox=True)
        return RankPlan(rank, self._buffers(), tuple(self.steps))

    def _box(self, buffer: str, top: int, bottom: int, columns: Slice, rank: int = -1) -> Region:
        at = self.rank if rank < 0 else rank
        return Region(at, buffer, top, bottom, columns.begin, columns.end)

    def _arrived(self, source: int, columns: Slice, rank: int = -1) -> Region:
        """Return the region of a source's products that `rank` (default: this one) adds up."""
        at = self.rank if rank < 0 else rank
        top = source * self.slot
        rows = self.problem.rows[at] if self.twice else self.problem.m
        return self._box(RECV, top, top + rows, columns, at)

    def _make(self, columns: Slice) -> None:
        """Add the steps that multiply a slice and store it where peers add it up."""
        rank, first, m = self.rank, self.first, self.problem.m
        begin, end = first[rank], first[rank + 1]
        pieces: list[Piece] = []
        for top, bottom in ((0, begin), (begin, end), (end, m)):
            if top == bottom:
                continue
            own = top == begin and bottom == end
            if self.twice:
                target = self._box(PARTIAL, top, bottom, columns)
                target = self._arrived(rank, columns) if own else target
            else:
                slot = rank * self.slot
                target = self._box(RECV, slot + top, slot + bottom, columns)
            add = self._bias(columns) if own and not self.twice else ()
            pieces.append(Piece(top, bottom, columns.begin, columns.end, target, add))
        if not self.twice and not self.problem.outputs[0].bias:
            pieces = [Piece(0, m, columns.begin, columns.end, self._arrived(rank, columns))]
        self.steps += self.products.steps(str(columns.number), pieces)
        if self.targets:
            sent = [self._part(peer, columns) for peer in self.targets]
            targets = [self._arrived(rank, columns, p) for p in self.targets]
            name, number = f"{columns.number}", columns.number
            self.steps += stored(rank, name, sent, targets, self.targets, number)

    def _part(self, peer: int, columns: Slice) -> Region:
        """Return the products that a peer adds up."""
        if not self.twice:
            return self._arrived(self.rank, columns)
        return self._box(PARTIAL, self.first[peer], self.first[peer + 1], columns)

    def _bias(self, columns: Slice) -> tuple[Region, ...]:
        return (self._box("bias0", 0, 1, columns),) if self.problem.outputs[0].bias else ()

    def _add_up(self, columns: Slice) -> tuple[Signal, ...]:
        """Wait for the peers' products, add them up, push the sums; return the signals."""
        signals = tuple([Signal(self.rank, "data", peer, columns.number) for peer in self.peers])
        terms = tuple([self._arrived(source, columns) for source in range(self.problem.world)])
        terms += self._bias(columns) if self.twice else ()
        sums = self._box("y0", self.top, self.bottom, columns)
        self.steps += [
            Step(f"wait.{columns.number}", COMPUTE, "wait", "none", signals=signals),
            Step(f"sum.{columns.number}", COMPUTE, "reduce", "sm", terms, (sums,)),
        ]
        if self.twice:
            targets = [self._box(REDUCED, self.top, self.bottom, columns, p) for p in self.peers]
            signal = self.schedule.chunks + columns.number
            name, sent = f"sum{columns.number}", [sums] * len(targets)
            self.steps += stored(self.rank, name, sent, targets, self.peers, signal)
        return signals

    def _collect(self, columns: Slice) -> tuple[Signal, ...]:
        """Wait for the owners' sums and move them into the output; return the signals."""
        index = self.schedule.chunks + columns.number
        signals = tuple([Signal(self.rank, "data", peer, index) for peer in self.owners])
        spans = [(0, self.top), (self.bottom, self.problem.m)]
        spans = [(top, bottom) for top, bottom in spans if top < bottom]
        reads = tuple([self._box(REDUCED, top, bottom, columns) for top, bottom in spans])
        writes = tuple([self._box("y0", top, bottom, columns) for top, bottom in spans])
        name = f"sum{columns.number}"
        self.steps += [
            Step(f"wait.{name}", COMPUTE, "wait", "none", signals=signals),
            Step(f"move.{name}", COMPUTE, "local_copy", "sm", reads, writes),
        ]
        return signals

    def _buffers(self) -> tuple[Buffer, ...]:
        m, n, dtype = self.problem.m, self.problem.n, self.problem.dtype
        world = self.problem.world
        buffers = [*self.products.operands(), Buffer("y0", "output", m, n, dtype)]
        buffers.append(Buffer(RECV, "mailbox", world * self.slot, n, dtype, copies=2))
        if self.twice:
            buffers.append(Buffer(REDUCED, "mailbox", m, n, dtype, copies=2))
            buffers.append(Buffer(PARTIAL, "workspace", m, n, dtype))
        return tuple(buffers)
