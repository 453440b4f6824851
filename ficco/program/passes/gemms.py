"""Products of a step as library calls: products at equal distances are one strided-batched GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ficco.plan import Product, Region, Step
from ficco.program import Gemm


def gemms_of(step: Step, products: Sequence[Product], batches: bool) -> list[Gemm]:
    """Return the library calls of a step's products, or of those of one of its parts.

    Args:
        step: a `gemm`.
        products: its products.
        batches: whether the library has strided-batched GEMMs.
    """
    turn_a, turn_b = step.transpose_a, step.transpose_b
    if not batches or len(products) == 1:
        return [Gemm(*product, turn_a, turn_b) for product in products]
    calls = []
    for run in runs_of(products, turn_a):
        rows_a = run[1].a.row0 - run[0].a.row0 if len(run) > 1 else 0
        rows_c = run[1].c.row0 - run[0].c.row0 if len(run) > 1 else 0
        calls.append(Gemm(*run[0], turn_a, turn_b, len(run), rows_a, rows_c))
    return calls


def runs_of(products: Sequence[Product], transpose_a: bool) -> list[tuple[Product, ...]]:
    """Split products into runs that one strided-batched GEMM can compute."""
    if len(products) < 2 or transpose_a:
        return [(product,) for product in products]
    runs = [[products[0]]]
    for last, product in pairwise(products):
        run = runs[-1]
        far = _rows_between(last, product)
        if far is not None and (len(run) == 1 or far == _rows_between(*run[:2])):
            run.append(product)
        else:
            runs.append([product])
    return [tuple(run) for run in runs]


def distance_of(regions: Sequence[Region]) -> int | None:
    """Return the row distance between regions, if they are alike and at equal distances."""
    if len(regions) < 2:
        return 0
    distances = {_rows_below(one, other) for one, other in pairwise(regions)}
    return distances.pop() if len(distances) == 1 else None


def _rows_between(one: Product, other: Product) -> tuple[int, int] | None:
    """Return the row distances of reads and writes of two products, if otherwise alike."""
    read, written = _rows_below(one.a, other.a), _rows_below(one.c, other.c)
    if read is None or written is None or not one.c.area:
        return None
    if (other.b, other.accumulate, other.add) != (one.b, one.accumulate, one.add):
        return None
    return None if any(term.rows != 1 for term in one.add) else (read, written)


def _rows_below(one: Region, other: Region) -> int | None:
    """Return the row distance from one region to a similar one below it, or None."""
    rank, buffer, row0, row1, *rest = one
    rows = other[2] - row0
    if rows > 0 and other == (rank, buffer, row0 + rows, row1 + rows, *rest):
        return rows
    return None
