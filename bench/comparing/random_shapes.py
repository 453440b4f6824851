"""Random shapes to evaluate `auto`, equal for equal seeds. It does not import torch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from ficco import operators
from ficco.measure.layout import Layout

__all__ = ["OPERATORS", "ROWS", "drawn", "how_drawn"]

OPERATORS = (
    "matmul_all_reduce", "all_gather_matmul", "matmul_reduce_scatter",
    "all_to_all_matmul", "matmul_all_to_all",
)  # fmt: skip
ROWS = (1, 16384)  # range of the rows over all ranks
WIDTHS = (512, 32768)  # range of n and k
STEP = 128  # n and k are multiples of this
MOST_FLOPS = 6e11  # of one rank: about a millisecond
MOST_BYTES = 1 << 29  # of one tensor of a rank


def how_drawn(rows: tuple[int, int]) -> str:
    """Describe shapes with these numbers of rows over all ranks."""
    return (
        f"log-uniform: {rows[0]} to {rows[1]} rows over all ranks (all-reduce: any number; else a "
        f"multiple of the ranks), n and k {WIDTHS[0]} to {WIDTHS[1]} in steps of {STEP}; at most "
        f"{MOST_FLOPS:g} operations of a rank and {MOST_BYTES} bytes of a tensor; bfloat16"
    )


def drawn(op: str, world: int, count: int, seed: int, rows: tuple[int, int] = ROWS) -> list[Layout]:
    """Return `count` shapes of an operator."""
    endless = _shapes(op, world, random.Random(f"{op} {seed}"), rows)
    return [next(endless) for _ in range(count)]


def _shapes(op: str, world: int, source: random.Random, rows: tuple[int, int]) -> Iterator[Layout]:
    while True:
        m = _size(source, *rows, 1)
        n, k = (_size(source, *WIDTHS, STEP) for _ in range(2))
        if op != "matmul_all_reduce":
            m = max(world, m // world * world)
        layout = Layout(op, m // world if operators.get(op).flow.splits else m, n, k, world)
        if operators.get(op).flow.splits and layout.m % world:  # equal rows to each rank
            continue
        if layout.flops <= MOST_FLOPS and _largest(layout) <= MOST_BYTES:
            yield layout


def _size(source: random.Random, least: int, most: int, step: int) -> int:
    size = math.exp(source.uniform(math.log(least), math.log(most)))
    return max(step, round(size / step) * step)


def _largest(layout: Layout) -> int:
    gathered = (layout.m, layout.w[0])
    sizes = (layout.x, layout.w, layout.y, layout.product, gathered)
    return layout.item_bytes * max(rows * columns for rows, columns in sizes)
