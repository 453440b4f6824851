"""Producing: the steps that make a piece of a rank's result, by GEMM or by pooling bags.

A piece is a box of the result that this rank makes for all ranks: rows of x times columns of w, or
bags of the batch by columns of its tables. The piece holds its target: a workspace to push from, or
an own result. This module does not depend on order, push lanes or arrivals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ficco.lowering.attachments import Terms, row_regions, rows_added
from ficco.operators.problem import Pair, Problem, offsets
from ficco.plan import (
    Buffer,
    Part,
    Product,
    RankPlan,
    Region,
    Signal,
    Step,
    modes_in_step,
    operand_buffers,
)

COMPUTE = "compute"
PARTIAL = "partial"  # workspace: products for peers and, in a reduction, for this rank


class Piece(NamedTuple):
    """Rows [row0, row1) and columns [col0, col1) of the result, and the terms added to them.

    They are stored in `target`. Nothing is added to bags.
    """

    row0: int
    row1: int
    col0: int
    col1: int
    target: Region
    add: tuple[Region, ...] = ()


class Gated(NamedTuple):
    """Pieces that are one part of a launch, and the signals it waits for and raises when made."""

    pieces: tuple[Piece, ...]
    waits: tuple[Signal, ...] = ()
    raises: tuple[Signal, ...] = ()


class Producer(Protocol):
    """Makes pieces."""

    def begin(self, pieces: Sequence[Piece]) -> list[Step]:
        """Return the steps that run before all others, given all pieces to make."""

    def steps(self, name: str, pieces: Sequence[Piece]) -> list[Step]:
        """Return the steps that make `pieces`; all are made when the last step ends."""

    def gated(self, name: str, groups: Sequence[Gated]) -> list[Step]:
        """Return one launch with a part per group; a GEMM is called `name`. No group: no steps."""


class Products:
    """Pieces by GEMM: x [rows, k_r] times w [k_r, n]. If k_r is 0, only the added terms.

    With several pairs of x and w, all but the deepest are multiplied first, each in one step. The
    deepest pair is multiplied in pieces, which are added to those products.
    """

    def __init__(self, problem: Problem, rank: int) -> None:
        self.problem, self.rank = problem, rank
        self.output = problem.outputs[0]
        only = Pair("x", self.output.operand, problem.k)
        self.pairs = problem.pairs_of(rank) if problem.depths else (only,)
        *before, self.last = sorted(self.pairs, key=lambda pair: pair.depth)  # stable
        self.before = [pair for pair in before if pair.depth]
        self.depth = self.last.depth
        self.height = problem.m if problem.depths else problem.rows[rank]
        self.terms = Terms(problem, rank)

    def begin(self, pieces: Sequence[Piece]) -> list[Step]:
        """See `Producer.begin`: all pairs but the last."""
        return [
            self._step(f"begin.{pair.x}", [self._product(pair, piece, i > 0) for piece in pieces])
            for i, pair in enumerate(self.before)
        ]

    def whole(self, target: Region, add: tuple[Region, ...]) -> list[Step]:
        """Return the steps that make the whole result at once."""
        piece = self._with_terms(Piece(0, target.rows, 0, target.cols, target, add))
        return [
            self._step(
                f"gemm.{pair.x}",
                [self._product(pair, piece if i == 0 else piece._replace(add=()), i > 0)],
            )
            for i, pair in enumerate([*self.before, self.last])
        ]

    def steps(self, name: str, pieces: Sequence[Piece]) -> list[Step]:
        """See `Producer.steps`."""
        pieces = [self._with_terms(piece) for piece in pieces]
        if not self.depth:
            return [
                Step(f"zero.{name}.{i}", COMPUTE, "reduce", "sm", piece.add, (piece.target,))
                for i, piece in enumerate(pieces)
            ]
        sums = []
        if self.before:  # pieces are added to the products of `begin`
            sums = [
                Step(f"add.{name}.{i}", COMPUTE, "reduce", "sm", (piece.target, *piece.add),
                     (piece.target,))
                for i, piece in enumerate(pieces)
                if piece.add
            ]  # fmt: skip
            pieces = [piece._replace(add=()) for piece in pieces]
        return [*sums, self._step(f"gemm.{name}", [self._last(piece) for piece in pieces])]

    def gated(self, name: str, groups: Sequence[Gated]) -> list[Step]:
        """See `Producer.gated`. If k_r is 0, each part is separate wait, sum and signal steps."""
        if not groups:
            return []
        if not self.depth:
            steps: list[Step] = []
            for number, (pieces, waits, raised) in enumerate(groups):
                if waits:
                    wait = Step(f"wait.{name}.{number}", COMPUTE, "wait", "none", signals=waits)
                    steps.append(wait)
                steps += self.steps(f"{name}.{number}", pieces)
                if raised:
                    ready = Step(f"ready.{name}.{number}", COMPUTE, "raise", "none", signals=raised)
                    steps.append(ready)
            return steps
        parts = tuple(
            Part(waits, tuple([self._last(self._with_terms(p)) for p in pieces]), raises=raised)
            for pieces, waits, raised in groups
        )
        # The launch waits for products of peers' kernels.
        spins = any(group.waits for group in groups)
        transposed = self.output.operand_transposed
        step = Step(name, COMPUTE, "gemm", "sm", parts=parts, transpose_b=transposed)
        return [step._replace(concurrent=spins)]

    def operands(self) -> list[Buffer]:
        """Return the buffers that the steps read."""
        return _read(self.problem, self.rank)

    def _step(self, name: str, products: Sequence[Product]) -> Step:
        transposed = self.output.operand_transposed
        return Step(name, COMPUTE, "gemm", "sm", products=tuple(products), transpose_b=transposed)

    def _with_terms(self, piece: Piece) -> Piece:
        """Return a piece plus the terms of its rows of x."""
        rows = Region(self.rank, "x", piece.row0, piece.row1, 0, 0)
        return piece._replace(add=(*self.terms.of(rows, piece.col0, piece.col1), *piece.add))

    def _last(self, piece: Piece) -> Product:
        return self._product(self.last, piece, bool(self.before))

    def _product(self, pair: Pair, piece: Piece, accumulate: bool) -> Product:
        rank, depth = self.rank, pair.depth
        a = Region(rank, pair.x, piece.row0, piece.row1, 0, depth)
        if self.output.operand_transposed:
            b = Region(rank, pair.w, piece.col0, piece.col1, 0, depth)
        else:
            b = Region(rank, pair.w, 0, depth, piece.col0, piece.col1)
        return Product(a, b, piece.target, accumulate, piece.add)


def _read(problem: Problem, rank: int) -> list[Buffer]:
    return [buffer for buffer in operand_buffers(problem, rank) if buffer.role != "output"]


class Bags:
    """Pieces by pooling: bags of the batch, over all tables of this rank side by side."""

    def __init__(self, problem: Problem, rank: int, lookups: Sequence[int]) -> None:
        self.problem, self.rank, self.lookups = problem, rank, lookups
        self.dim = problem.outputs[0].columns[0]
        self.tables, self.modes = problem.tables[rank], problem.modes_of(rank)

    def begin(self, pieces: Sequence[Piece]) -> list[Step]:
        """See `Producer.begin`."""
        return []

    def whole(self, target: Region, add: tuple[Region, ...]) -> list[Step]:
        """Return the steps that make the whole result at once; nothing is added to bags."""
        return self.steps("all", [Piece(0, target.rows, 0, target.cols, target)])

    def steps(self, name: str, pieces: Sequence[Piece]) -> list[Step]:
        """See `Producer.steps`."""
        reads, writes, modes = self._regions(pieces)
        return [Step(f"bag.{name}", COMPUTE, "bag", "sm", reads, writes, modes=modes)]

    def gated(self, name: str, groups: Sequence[Gated]) -> list[Step]:
        """See `Producer.gated`."""
        parts = []
        for pieces, waits, raised in groups:
            reads, writes, modes = self._regions(pieces)
            parts.append(Part(waits, reads=reads, writes=writes, raises=raised, modes=modes))
        return [Step("bag", COMPUTE, "bag", "sm", parts=tuple(parts))] if parts else []

    def operands(self) -> list[Buffer]:
        """Return the buffers that the steps read."""
        return _read(self.problem, self.rank)

    def _regions(
        self, pieces: Sequence[Piece]
    ) -> tuple[tuple[Region, ...], tuple[Region, ...], tuple[str, ...]]:
        """Return the reads, the target's columns and the modes, for every piece and table."""
        reads: list[Region] = []
        writes: list[Region] = []
        rank, edges = self.rank, offsets([self.dim] * len(self.tables))
        for piece in pieces:
            for i, rows in enumerate(self.tables):
                target = piece.target
                left = target.col0 + edges[i]
                reads += [
                    Region(rank, f"table{i}", 0, rows, 0, self.dim),
                    Region(rank, f"indices{i}", 0, 1, 0, self.lookups[i]),
                    Region(rank, f"offsets{i}", 0, 1, piece.row0, piece.row1),
                ]
                if self.modes[i] == "weighted":
                    reads.append(Region(rank, f"weights{i}", 0, 1, 0, self.lookups[i]))
                writes.append(target._replace(col0=left, col1=left + self.dim))
        return tuple(reads), tuple(writes), modes_in_step(self.modes * len(pieces))


def alone(problem: Problem, producer: Products | Bags) -> RankPlan:
    """Return the plan of a world of one, for operators that multiply or pool before they send."""
    rows, columns = problem.result_shapes(0)[0]
    added = row_regions(0, rows_added(problem, 0), 0, columns)
    steps = producer.whole(Region(0, "y0", 0, rows, 0, columns), added)
    return RankPlan(0, tuple(operand_buffers(problem, 0)), tuple(steps))
