"""Multiplying what is gathered: GEMMs of pieces of x with the weights of every output.

A piece lies where the user has x, or in the window. Which pieces are multiplied together, and when,
is said by groups; nothing here knows pushes or the order of arrivals.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from ficco.operators.blocks import Blocks
from ficco.plan import Buffer, Part, Product, Region, Signal, Step
from ficco.problem import Output, Problem

__all__ = ["COMPUTE", "WINDOW", "Group", "Multiplied", "Piece"]

WINDOW = "gathered"
COMPUTE = "compute"


class Piece(NamedTuple):
    """A box of the gathered input: where it lies, and its global row and column range."""

    buffer: str
    shift: int  # global row minus row in the buffer
    row0: int
    row1: int
    col0: int
    col1: int


class Group(NamedTuple):
    """What one GEMM step (or one part of a gated step) multiplies, and what it waits for."""

    name: str
    waits: tuple[Signal, ...]
    pieces: tuple[Piece, ...]


class Multiplied:
    """Turns pieces into products of every output, and knows which outputs need a float32 sum.

    An output along rows multiplies a piece with the weight's rows that stand for its columns; it
    adds up where the cut is by columns. One along the contraction multiplies the transposed piece
    with the weight's rows that stand for its rows; it adds up where the cut is by rows.

    Attributes:
        all: numbers of the outputs that are products.
        first: of those that are made of what arrives, as it arrives.
        late: of those that are made at the end: along the contraction, beside others.
        kept: of outputs that are the gathered x.
        summed: of those that are added to.
    """

    def __init__(self, problem: Problem, blocks: Blocks) -> None:
        self.problem, self.blocks, self.rank = problem, blocks, blocks.rank
        axes: dict[str, list[int]] = {"rows": [], "contraction": [], "gathered": []}
        for index, output in enumerate(problem.outputs):
            axes[output.axis].append(index)
        self.kept = axes["gathered"]
        self.all = sorted(axes["rows"] + axes["contraction"])
        self.first, self.late = axes["rows"], axes["contraction"]
        if not self.first:
            self.first, self.late = self.late, []
        self.summed: set[int] = set()

    def gemms(self, groups: list[Group], wanted: list[int], gated: bool) -> list[Step]:
        """Return waits and GEMMs of all groups, or one gated GEMM with a part per group."""
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for index in wanted:
            output = self.problem.outputs[index]
            if output.columns[self.rank]:
                flags = (output.axis == "contraction", output.operand_transposed)
                kinds.setdefault(flags, []).append(index)
        touched = self._accumulations(groups, wanted)
        steps: list[Step] = []
        if gated:
            for number, ((trans_a, trans_b), indices) in enumerate(kinds.items()):
                parts = tuple(
                    Part(group.waits, self._products(group, indices, touched[g]))
                    for g, group in enumerate(groups)
                )
                name = "gemm" + (f".{number}" if number else "")
                steps.append(
                    Step(
                        name, COMPUTE, "gemm", "sm", parts=parts,
                        transpose_a=trans_a, transpose_b=trans_b,
                    )
                )  # fmt: skip
            signals = tuple(signal for group in groups for signal in group.waits)
            if not kinds and signals:  # no columns here: arrivals are awaited all the same
                steps.append(Step("wait.all", COMPUTE, "wait", "none", signals=signals))
            return steps
        for g, group in enumerate(groups):
            if group.waits:
                steps.append(
                    Step(f"wait.{group.name}", COMPUTE, "wait", "none", signals=group.waits)
                )
            for number, ((trans_a, trans_b), indices) in enumerate(kinds.items()):
                name = f"gemm.{group.name}" + (f".{number}" if number else "")
                products = self._products(group, indices, touched[g])
                steps.append(
                    Step(
                        name, COMPUTE, "gemm", "sm", products=products,
                        transpose_a=trans_a, transpose_b=trans_b,
                    )
                )  # fmt: skip
        return steps

    def _accumulations(
        self, groups: list[Group], wanted: list[int]
    ) -> list[dict[tuple[int, int], bool]]:
        """Return per group, by (output, piece): whether its product adds to an earlier one."""
        seen: dict[int, list[tuple[int, int]]] = {i: [] for i in wanted}  # disjoint, in order
        result = []
        for group in groups:
            adds: dict[tuple[int, int], bool] = {}
            for p, piece in enumerate(group.pieces):
                for i in wanted:
                    begin, end = _range_in(self.problem.outputs[i], piece)
                    at = bisect_right(seen[i], begin, key=_end)
                    adds[i, p] = at < len(seen[i]) and seen[i][at][0] < end
                    if adds[i, p]:
                        self.summed.add(i)
                    else:
                        seen[i].insert(at, (begin, end))
            result.append(adds)
        return result

    def _products(
        self, group: Group, indices: list[int], adds: dict[tuple[int, int], bool]
    ) -> tuple[Product, ...]:
        rank, products = self.rank, []
        for i in indices:
            output = self.problem.outputs[i]
            columns = output.columns[rank]
            target = self._target(i)
            for p, piece in enumerate(group.pieces):
                shift = piece.shift
                a = Region(
                    rank, piece.buffer, piece.row0 - shift, piece.row1 - shift, piece.col0,
                    piece.col1,
                )  # fmt: skip
                if output.axis == "rows":
                    deep = (piece.col0, piece.col1)
                else:
                    deep = (piece.row0, piece.row1)
                if output.operand_transposed:
                    b = Region(rank, output.operand, 0, columns, *deep)
                else:
                    b = Region(rank, output.operand, *deep, 0, columns)
                c = Region(rank, target, *_range_in(output, piece), 0, columns)
                added = adds[i, p]
                bias = output.bias and not added
                add = (Region(rank, f"bias{i}", 0, 1, 0, columns),) if bias else ()
                products.append(Product(a, b, c, added, add))
        return tuple(products)

    def _target(self, index: int) -> str:
        widened = index in self.summed and self.problem.dtype != "float32"
        return f"acc{index}" if widened else f"y{index}"

    def _height(self, output: Output) -> int:
        return self.problem.k if output.axis == "contraction" else self.blocks.arriving

    def roundings(self) -> list[Step]:
        """Return the conversions of float32 sums into outputs."""
        steps = []
        for i in sorted(self.summed):
            output = self.problem.outputs[i]
            columns = output.columns[self.rank]
            if self._target(i) == f"y{i}" or not columns:
                continue
            box = (0, self._height(output), 0, columns)
            source, target = (Region(self.rank, name, *box) for name in (f"acc{i}", f"y{i}"))
            steps.append(Step(f"round.{i}", COMPUTE, "reduce", "sm", (source,), (target,)))
        return steps

    def buffers(self, window: bool) -> tuple[Buffer, ...]:
        """Return all buffers of this rank; call after `gemms`, which finds what is summed."""
        problem, rank = self.problem, self.rank
        found = [Buffer("x", "input", problem.rows[rank], problem.k, problem.dtype)]
        operands: set[str] = set()
        for i, output in enumerate(problem.outputs):
            columns = output.columns[rank]
            depth = problem.m if output.axis == "contraction" else problem.k
            if output.operand not in operands and output.axis != "gathered":
                operands.add(output.operand)
                shape = (columns, depth) if output.operand_transposed else (depth, columns)
                found.append(Buffer(output.operand, "weight", *shape, problem.dtype))
            if output.bias:
                found.append(Buffer(f"bias{i}", "weight", 1, columns, problem.dtype))
            height = self._height(output)
            found.append(Buffer(f"y{i}", "output", height, columns, problem.dtype))
            if self._target(i) == f"acc{i}":
                found.append(Buffer(f"acc{i}", "workspace", height, columns, "float32"))
        if window:
            rows = self.blocks.window_rows
            found.append(Buffer(WINDOW, "window", rows, problem.k, problem.dtype, copies=2))
        return tuple(found)


def _range_in(output: Output, piece: Piece) -> tuple[int, int]:
    """Return the rows of an output that a piece contributes to."""
    if output.axis == "rows":
        return piece.row0, piece.row1
    return piece.col0, piece.col1


def _end(interval: tuple[int, int]) -> int:
    return interval[1]
