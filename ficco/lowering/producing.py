"""Producing: the steps that make a piece of what a rank sends, by GEMM or by pooling bags.

A piece is a box of what this rank makes for all ranks: rows of x times columns of w, or bags of the
batch by columns of its tables. Where it goes (a workspace to be pushed, or an own result) is said
by the piece. Nothing here knows order, lanes of pushes or arrivals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ficco.plan import Buffer, Part, Product, Region, Signal, Step
from ficco.problem import Pair, Problem, offsets

__all__ = ["COMPUTE", "PARTIAL", "Bags", "Gated", "Piece", "Producer", "Products"]

COMPUTE = "compute"
PARTIAL = "partial"  # workspace: what is made, for peers and, of a reduction, here


class Piece(NamedTuple):
    """Rows [row0, row1) and columns [col0, col1) of what is made, and what is added to them.

    `target` takes them. Nothing is added to bags.
    """

    row0: int
    row1: int
    col0: int
    col1: int
    target: Region
    add: tuple[Region, ...] = ()


class Gated(NamedTuple):
    """Pieces that are one part of a launch: what it waits for, and what it raises when made."""

    pieces: tuple[Piece, ...]
    waits: tuple[Signal, ...] = ()
    raises: tuple[Signal, ...] = ()


class Producer(Protocol):
    """Makes pieces."""

    def begin(self, pieces: Sequence[Piece]) -> list[Step]:
        """Return the steps that come before all others, given everything that is to be made."""

    def steps(self, name: str, pieces: Sequence[Piece]) -> list[Step]:
        """Return the steps that make some pieces; the last one ends when all are made."""

    def gated(self, name: str, groups: Sequence[Gated]) -> list[Step]:
        """Return one launch with a part per group, GEMMs by this name; nothing without a group."""

    def operands(self) -> list[Buffer]:
        """Return the buffers that it reads."""


class Products:
    """Pieces by GEMM: x [rows, k_r] times w [k_r, n]. Where k_r is 0 only what is added.

    Of several pairs of x and w the deepest is multiplied in pieces, which are added to the products
    of the others: those are made before, each at once.
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
        """Return the steps that make all of it at once."""
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
        if self.before:  # what comes is added to what was begun
            sums = [
                Step(f"add.{name}.{i}", COMPUTE, "reduce", "sm", (piece.target, *piece.add),
                     (piece.target,))
                for i, piece in enumerate(pieces)
                if piece.add
            ]  # fmt: skip
            pieces = [piece._replace(add=()) for piece in pieces]
        return [*sums, self._step(f"gemm.{name}", [self._last(piece) for piece in pieces])]

    def gated(self, name: str, groups: Sequence[Gated]) -> list[Step]:
        """See `Producer.gated`. Without a contraction the parts are waits, steps and signals."""
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
        # What it waits for, peers' kernels make.
        spins = any(group.waits for group in groups)
        turned = self.output.operand_transposed
        step = Step(name, COMPUTE, "gemm", "sm", parts=parts, transpose_b=turned)
        return [step._replace(concurrent=spins)]

    def operands(self) -> list[Buffer]:
        """See `Producer.operands`."""
        columns, dtype = self.output.columns[self.rank], self.problem.dtype
        turned = self.output.operand_transposed
        found = []
        for pair in self.pairs:
            shape = (columns, pair.depth) if turned else (pair.depth, columns)
            found += [
                Buffer(pair.x, "input", self.height, pair.depth, dtype),
                Buffer(pair.w, "weight", *shape, dtype),
            ]
        if self.output.bias:
            found.append(Buffer("bias0", "weight", 1, columns, dtype))
        return found

    def _step(self, name: str, products: Sequence[Product]) -> Step:
        turned = self.output.operand_transposed
        return Step(name, COMPUTE, "gemm", "sm", products=tuple(products), transpose_b=turned)

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
        self.tables = problem.tables[rank]

    def begin(self, pieces: Sequence[Piece]) -> list[Step]:
        """See `Producer.begin`."""
        return []

    def steps(self, name: str, pieces: Sequence[Piece]) -> list[Step]:
        """See `Producer.steps`."""
        reads, writes = self._threes(pieces)
        return [Step(f"bag.{name}", COMPUTE, "bag", "sm", reads, writes)]

    def gated(self, name: str, groups: Sequence[Gated]) -> list[Step]:
        """See `Producer.gated`."""
        parts = []
        for pieces, waits, raised in groups:
            reads, writes = self._threes(pieces)
            parts.append(Part(waits, reads=reads, writes=writes, raises=raised))
        return [Step("bag", COMPUTE, "bag", "sm", parts=tuple(parts))] if parts else []

    def operands(self) -> list[Buffer]:
        """See `Producer.operands`."""
        found = []
        for i, rows in enumerate(self.tables):
            found += [
                Buffer(f"table{i}", "weight", rows, self.dim, self.problem.dtype),
                Buffer(f"indices{i}", "input", 1, self.lookups[i], "int64"),
                Buffer(f"offsets{i}", "input", 1, self.problem.m, "int64"),
            ]
        return found

    def _threes(self, pieces: Sequence[Piece]) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
        """Return a table's reads and its columns of the target, for every piece and table."""
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
                writes.append(target._replace(col0=left, col1=left + self.dim))
        return tuple(reads), tuple(writes)
