"""matmul_all_reduce whose sums read the products of peers where they were made.

A GEMM stores the whole product in the own window. One kernel does the rest
(`ficco.kernels.pulled_all_reduce`): nothing is stored at peers but signals. Copies are loads of
that kernel: unit "sm". With three ranks:

    one shot    make | [free] enter | [entered] read all products, sum all rows
                | clear, free | [free of all peers, of this call]
    two shots   make | [free] enter | [entered] read the products of the own rows, sum chunk 0,
                signal it, ... | [sums 0] read chunk 0 of the owners' sums, ...
                | clear, free | [free of all peers, of this call]

`entered` comes after the product, so it also says that the product may be read. `free` says that a
rank has read all that it reads. A rank ends its call when all peers have raised it. Then its window
has been read, and its next GEMM may store there without a wait. Chunks are rows of the rank that
sums them; with one shot there are none, whatever the grain. Products are rounded to the dtype
before they are added.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ficco.errors import ScheduleError
from ficco.lowering.handshake import await_entered
from ficco.lowering.one_kernel import LANE, check_axes, closed, opened, signals_step
from ficco.lowering.producing import Piece, Products
from ficco.lowering.single import alone
from ficco.plan import Buffer, RankPlan, Region, Signal, Step
from ficco.problem import Problem, offsets
from ficco.schedule import Schedule

__all__ = ["PRODUCTS", "SUMS", "TERMS", "lower_pulled_all_reduce", "row_bounds"]

PRODUCTS = "products"  # window: the products of this rank
SUMS = "sums"  # window: the sums of this rank's rows, with two shots
TERMS = "terms"  # workspace: the peers' products, which the kernel holds in registers


def row_bounds(rows: int, chunks: int) -> list[int]:
    """Return the first row of each chunk of a rank's rows, and their number; some may be empty."""
    return [rows * number // chunks for number in range(chunks + 1)]


def lower_pulled_all_reduce(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering`."""
    _check(problem, schedule)
    products = Products(problem, rank)
    if problem.world == 1:
        return alone(problem, products)
    return _Pulled(problem, schedule, rank, products).plan()


def _check(problem: Problem, schedule: Schedule) -> None:
    check_axes(schedule, cut="rows", compute="whole")
    if (pairs := max(map(len, problem.pairs), default=1)) > 1:
        raise ScheduleError(
            f"matmul_all_reduce: transport='sm' multiplies one pair of x and w a rank; {pairs} "
            "found; the nearest that works is transport='dma'"
        )
    if problem.world > 1 and schedule.shots == "one" and problem.outputs[0].bias:
        raise ScheduleError(
            "compute='whole' with transport='sm', shots='one' and a bias: a row's bias is that of "
            "the rank that owns it, and other ranks do not have it; what works is shots='two'"
        )


@dataclass
class _Pulled:
    """Steps under construction, of one rank."""

    problem: Problem
    schedule: Schedule
    rank: int
    products: Products
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        problem, rank = self.problem, self.rank
        world, rows = problem.world, problem.rows
        self.twice = self.schedule.shots == "two"
        self.first = offsets(rows)
        self.peers = [(rank + turn) % world for turn in range(1, world)]
        self.owners = [peer for peer in self.peers if rows[peer]] if self.twice else []
        self.top = self.first[rank] if self.twice else 0
        self.rows = rows[rank] if self.twice else problem.m
        self.chunks = self.schedule.chunks if self.twice else 1

    def plan(self) -> RankPlan:
        """Return the plan."""
        rank, peers, problem = self.rank, self.peers, self.problem
        whole = self._box(PRODUCTS, 0, problem.m)
        self.steps += self.products.steps("all", [Piece(0, problem.m, 0, problem.n, whole)])
        self.steps += opened(rank, peers)
        self.steps.append(await_entered(rank, peers, LANE))
        heard: list[Signal] = []
        bounds = row_bounds(self.rows, self.chunks)
        for number in range(self.chunks if self.rows else 0):
            self._add_up(number, self.top + bounds[number], self.top + bounds[number + 1])
        for number in range(self.chunks if self.owners else 0):
            heard += self._collect(number)
        self.steps += closed(rank, peers, heard)
        free = tuple([Signal(rank, "free", peer) for peer in peers])
        self.steps.append(signals_step("wait_read", "wait", free))
        return RankPlan(rank, self._buffers(), tuple(self.steps))

    def _box(self, buffer: str, top: int, bottom: int, rank: int = -1) -> Region:
        return Region(self.rank if rank < 0 else rank, buffer, top, bottom, 0, self.problem.n)

    def _add_up(self, number: int, top: int, bottom: int) -> None:
        """Read the peers' products of these rows and add them up; with two shots, signal it."""
        rank, world = self.rank, self.problem.world
        if top == bottom:
            return
        reads = [self._box(PRODUCTS, top, bottom, peer) for peer in self.peers]
        slots = {peer: i * self.rows - self.top for i, peer in enumerate(self.peers)}
        held = {peer: self._box(TERMS, slot + top, slot + bottom) for peer, slot in slots.items()}
        terms = [held.get(source, self._box(PRODUCTS, top, bottom)) for source in range(world)]
        if self.problem.outputs[0].bias:
            terms.append(self._box("bias0", 0, 1))
        target = self._box(SUMS if self.twice else "y0", top, bottom)
        self.steps += [
            Step(f"pull.{number}", LANE, "copy", "sm", tuple(reads), tuple(held.values())),
            Step(f"sum.{number}", LANE, "reduce", "sm", tuple(terms), (target,)),
        ]
        if self.twice:
            kept = self._box("y0", top, bottom)
            ready = tuple([Signal(peer, "data", rank, number) for peer in self.peers])
            self.steps += [
                Step(f"keep.{number}", LANE, "local_copy", "sm", (target,), (kept,)),
                signals_step(f"summed.{number}", "raise", ready),
            ]

    def _collect(self, number: int) -> tuple[Signal, ...]:
        """Wait for a chunk of every owner's sums and read it into y; return the signals."""
        signals, reads, writes = [], [], []
        for owner in self.owners:
            top, bounds = self.first[owner], row_bounds(self.problem.rows[owner], self.chunks)
            begin, end = top + bounds[number], top + bounds[number + 1]
            if begin < end:
                signals.append(Signal(self.rank, "data", owner, number))
                reads.append(self._box(SUMS, begin, end, owner))
                writes.append(self._box("y0", begin, end))
        if signals:
            self.steps += [
                signals_step(f"wait.{number}", "wait", tuple(signals)),
                Step(f"collect.{number}", LANE, "copy", "sm", tuple(reads), tuple(writes)),
            ]
        return tuple(signals)

    def _buffers(self) -> tuple[Buffer, ...]:
        m, n, dtype = self.problem.m, self.problem.n, self.problem.dtype
        buffers = [*self.products.operands(), Buffer("y0", "output", m, n, dtype)]
        buffers.append(Buffer(PRODUCTS, "window", m, n, dtype, copies=2))
        if self.twice:
            buffers.append(Buffer(SUMS, "window", m, n, dtype, copies=2))
        buffers.append(Buffer(TERMS, "workspace", len(self.peers) * self.rows, n, dtype))
        return tuple(buffers)
