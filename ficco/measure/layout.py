"""A rank's tensors of a shape: what each holds, sends and gets. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ficco.core.dtypes import DTYPES
from ficco.operators import registry
from ficco.operators.problem import Problem

Shape = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """An operator on a shape that splits evenly over ranks, and what a rank holds of it.

    Attributes:
        op, n, k, world, dtype: as everywhere.
        m: rows on each rank for all-to-all, else over all ranks.
    """

    op: str
    m: int
    n: int
    k: int
    world: int
    dtype: str = "bfloat16"

    @property
    def flow(self) -> registry.Flow:
        """How the operator's data flows."""
        return registry.get(self.op).flow

    @property
    def id(self) -> str:
        """Operator and shape."""
        return f"{self.op} {self.m}x{self.n}x{self.k}"

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype]

    @property
    def problem(self) -> Problem:
        """The problem over all ranks."""
        m = self.m * self.world if self.flow.splits else self.m
        return Problem.chunked(self.op, self.world, m, self.n, self.k, self.dtype)

    def of_columns(self, count: int) -> Layout:
        """Return the layout of so many columns of every rank's output."""
        return replace(self, n=count * self.world if self.flow.own_columns else count)

    @property
    def unfit(self) -> str:
        """Say why the shape cannot be split evenly; empty where it can."""
        split = {"m": self.m}
        if self.flow.own_columns:
            split["n"] = self.n
        elif not self.flow.splits:
            split["k"] = self.k
        odd = [f"{name}={size}" for name, size in split.items() if size % self.world]
        return f"{', '.join(odd)} not divisible by {self.world}" if odd else ""

    @property
    def x(self) -> Shape:
        """Shape of a rank's input."""
        if self.flow.own_columns:
            return self.m // self.world, self.k
        return self.m, self.k if self.flow.splits else self.k // self.world

    @property
    def w(self) -> Shape:
        """Shape of a rank's weight."""
        if self.flow.own_columns:
            return self.k, self.n // self.world
        return self.x[1], self.n

    @property
    def product(self) -> Shape:
        """Shape of a rank's whole GEMM's result."""
        return self.m, self.w[1]

    @property
    def y(self) -> Shape:
        """Shape of a rank's output."""
        rows = self.m // self.world if self.flow.finish == "sum" else self.m
        return rows, self.w[1]

    @property
    def flops(self) -> float:
        """Operations of one rank."""
        return 2.0 * self.m * self.w[0] * self.w[1]

    @property
    def piece(self) -> int:
        """Elements that a rank sends to one peer at once."""
        width = self.k if self.flow.gathers else self.n
        return self.m // self.world * width

    @property
    def passes(self) -> int:
        """How many times a rank sends a piece to every peer."""
        return self.flow.passes

    @property
    def bytes_out(self) -> int:
        """Bytes that must leave a rank."""
        return self.passes * (self.world - 1) * self.piece * self.item_bytes

    @property
    def sets(self) -> int:
        """Sets of inputs in turn, so that together they exceed the L2 (60 MB) twice."""
        each = self.item_bytes * (self.x[0] * self.x[1] + self.w[0] * self.w[1])
        return min(10, max(2, -(-120_000_000 // each)))
