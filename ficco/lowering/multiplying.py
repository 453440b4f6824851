"""Multiplying the gathered input: GEMMs of pieces of x with the weights of every output.

A piece is stored in the user's x, or in the window. Groups define which pieces are multiplied
together, and when. This module does not depend on pushes or on the order of arrivals.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from ficco.lowering.attachments import Terms, row_regions, rows_added
from ficco.operators.blocks import Blocks
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan import Buffer, Part, Product, Region, Signal, Step, operand_buffers

WINDOW = "gathered"
COMPUTE = "compute"


class Piece(NamedTuple):
    """A box of the gathered input: its buffer, and its global row and column range."""

    buffer: str
    shift: int  # global row minus row in the buffer
    row0: int
    row1: int
    col0: int
    col1: int


class Group(NamedTuple):
    """The pieces of one GEMM step (or one part of a gated step), and the signals it waits for."""

    name: str
    waits: tuple[Signal, ...]
    pieces: tuple[Piece, ...]


class Multiplied:
    """Turns pieces into products of every output, and records the outputs that need a float32 sum.

    An output along rows multiplies a piece with the weight rows that match the piece's columns; a
    cut by columns makes it a sum. An output along the contraction multiplies the transposed piece
    with the weight rows that match the piece's rows; a cut by rows makes it a sum.

    Attributes:
        all: indices of the outputs that are products.
        first: indices of the outputs that are made from chunks as they arrive.
        late: indices of the outputs made at the end: along the contraction, next to others.
        kept: indices of the outputs that are the gathered x.
        summed: indices of the outputs that products are added to.
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
        self.terms = Terms(problem, self.rank, WINDOW)
        self.rows = {i: rows_added(problem, self.rank, i) for i in self.all}

    def gemms(self, groups: list[Group], wanted: list[int], gated: bool) -> list[Step]:
        """Return the waits and GEMMs of all groups, or gated GEMMs with one part per group."""
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
            if not kinds and signals:  # no columns here: wait for arrivals anyway
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
        """Return for each group, by (output, piece), whether its product adds to an earlier one."""
        ranges: dict[int, list[tuple[int, int]]] = {i: [] for i in wanted}  # disjoint, in order
        result = []
        for group in groups:
            adds: dict[tuple[int, int], bool] = {}
            for p, piece in enumerate(group.pieces):
                for i in wanted:
                    begin, end = _range_in(self.problem.outputs[i], piece)
                    at = bisect_right(ranges[i], begin, key=_end)
                    adds[i, p] = at < len(ranges[i]) and ranges[i][at][0] < end
                    if adds[i, p]:
                        self.summed.add(i)
                    else:
                        ranges[i].insert(at, (begin, end))
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
                    depth = (piece.col0, piece.col1)
                else:
                    depth = (piece.row0, piece.row1)
                if output.operand_transposed:
                    b = Region(rank, output.operand, 0, columns, *depth)
                else:
                    b = Region(rank, output.operand, *depth, 0, columns)
                c = Region(rank, target, *_range_in(output, piece), 0, columns)
                added = adds[i, p]
                add: tuple[Region, ...] = ()
                if not added:
                    rows = row_regions(rank, self.rows[i], 0, columns)
                    add = (*self.terms.of(a, 0, columns), *rows)
                products.append(Product(a, b, c, added, add))
        return tuple(products)

    def _target(self, index: int) -> str:
        widened = index in self.summed and self.problem.dtype != "float32"
        return f"acc{index}" if widened else f"y{index}"

    def _height(self, output: Output) -> int:
        return self.problem.k if output.axis == "contraction" else self.blocks.arriving

    def roundings(self) -> list[Step]:
        """Return the steps that round float32 sums into outputs."""
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
        """Return all buffers of this rank. Call after `gemms`, which records `summed`."""
        problem = self.problem
        result = operand_buffers(problem, self.rank)
        for i in sorted(self.summed):
            if self._target(i) == f"acc{i}":
                output = problem.outputs[i]
                shape = self._height(output), output.columns[self.rank]
                result.append(Buffer(f"acc{i}", "workspace", *shape, "float32"))
        if window:
            rows = self.blocks.window_rows
            result.append(Buffer(WINDOW, "window", rows, problem.k, problem.dtype, copies=2))
            result += self.terms.windows(rows)
        return tuple(result)


def _range_in(output: Output, piece: Piece) -> tuple[int, int]:
    """Return the rows of an output that a piece contributes to."""
    if output.axis == "rows":
        return piece.row0, piece.row1
    return piece.col0, piece.col1


def _end(interval: tuple[int, int]) -> int:
    return interval[1]
