"""Producing: the steps that make a piece of a rank's result, by GEMM or by pooling bags.

A piece is a box of the result that this rank makes for all ranks: rows of x times columns of w, or
bags of the batch by columns of its tables. The piece holds its target: a workspace to push from, or
an own result. This module does not depend on order, push lanes or arrivals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ficco.plan import Buffer, Part, Product, Region, Signal, Step, modes_in_step
from ficco.problem import Pair, Problem, offsets

__all__ = ["COMPUTE", "PARTIAL", "Bags", "Gated", "Piece", "Producer", "Products"]

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

    def operands(self) -> list[Buffer]:
        """Return the buffers that the steps read."""


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

    def begin(self, pieces: Sequence[Piece]) -> list[Step]:
        """See `Producer.begin`: all pairs but the last."""
        return [
            self._step(f"begin.{pair.x}", [self._product(pair, piece, i > 0) for piece in pieces])
            for i, pair in enumerate(self.before)
        ]

    def whole(self, target: Region, add: tuple[Region, ...]) -> list[Step]:
        """Return the steps that make the whole result at once."""
        piece = Piece(0, target.rows, 0, target.cols, target, add)
        return [
            self._step(
                f"gemm.{pair.x}",
                [self._product(pair, piece if i == 0 else piece._replace(add=()), i > 0)],
            )
            for i, pair in enumerate([*self.before, self.last])
        ]

    def steps(self, name: str, pieces: Sequence[Piece]) -> list[Step]:
        """See `Producer.steps`."""
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
            Part(waits, tuple([self._last(piece) for piece in pieces]), raises=raised)
            for pieces, waits, raised in groups
        )
        # The launch waits for products of peers' kernels.
        spins = any(group.waits for group in groups)
        transposed = self.output.operand_transposed
        step = Step(name, COMPUTE, "gemm", "sm", parts=parts, transpose_b=transposed)
        return [step._replace(concurrent=spins)]

    def operands(self) -> list[Buffer]:
        """See `Producer.operands`."""
        columns, dtype = self.output.columns[self.rank], self.problem.dtype
        transposed = self.output.operand_transposed
        buffers = []
        for pair in self.pairs:
            shape = (columns, pair.depth) if transposed else (pair.depth, columns)
            buffers += [
                Buffer(pair.x, "input", self.height, pair.depth, dtype),
                Buffer(pair.w, "weight", *shape, dtype),
            ]
        if self.output.bias:
            buffers.append(Buffer("bias0", "weight", 1, columns, dtype))
        return buffers

    def _step(self, name: str, products: Sequence[Product]) -> Step:
        transposed = self.output.operand_transposed
        return Step(name, COMPUTE, "gemm", "sm", products=tuple(products), transpose_b=transposed)

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


class Bags:
    """Pieces by pooling: bags of the batch, over all tables of this rank side by side."""

    def __init__(self, problem: Problem, rank: int, lookups: Sequence[int]) -> None:
        self.problem, self.rank, self.lookups = problem, rank, lookups
        self.dim = problem.outputs[0].columns[0]
        self.tables, self.modes = problem.tables[rank], problem.modes_of(rank)

    def begin(self, pieces: Sequence[Piece]) -> list[Step]:
        """See `Producer.begin`."""
        return []

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
        """See `Producer.operands`."""
        buffers, index_dtype = [], self.problem.index_dtype
        for i, rows in enumerate(self.tables):
            buffers += [
                Buffer(f"table{i}", "weight", rows, self.dim, self.problem.dtype),
                Buffer(f"indices{i}", "input", 1, self.lookups[i], index_dtype),
                Buffer(f"offsets{i}", "input", 1, self.problem.m, index_dtype),
            ]
            if self.modes[i] == "weighted":
                buffers.append(Buffer(f"weights{i}", "input", 1, self.lookups[i], "float32"))
        return buffers

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
