"""The oracle: what an operator must give, in float64, and how far from it a result may be.

Used by `ficco run`, tests and bench alike, so that "right" means one thing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ficco.problem import Problem, offsets

__all__ = ["UNIT_ROUNDOFF", "Exact", "Verdict", "inputs", "judge", "results"]

Array = npt.NDArray[Any]
Named = Mapping[str, Array]

# Half a unit in the last place. With s = |x| |w| a result y may differ from the exact one by
#   roundings * UNIT_ROUNDOFF[dtype] |y|  +  SUM_FACTOR sqrt(terms) 2^-24 s:
# the roundings to the dtype, and a float32 sum whose errors add up as a random walk. Partial sums
# that travel in the dtype are rounded relative to themselves, which s / sqrt(ranks) bounds well.
# Leaving out one of k terms changes y by about s / k, which this catches up to k of some 10^5.
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SUM_FACTOR = 4.0
SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}  # subnormal spacing


class Exact(NamedTuple):
    """What a rank must get.

    Attributes:
        value: float64, of the output's shape.
        magnitude: the same sum over absolute values.
        partial: an upper bound of the absolute rounding of partial sums that travelled.
        terms: how many terms a sum has.
    """

    value: Array
    magnitude: Array
    partial: Array
    terms: int


class Verdict(NamedTuple):
    """How a result compares. `max_rel_error` is relative to |x| |w|, elementwise."""

    ok: bool
    max_rel_error: float


def inputs(problem: Problem, seed: int) -> list[dict[str, Array]]:
    """Return per rank random inputs by buffer name: x of N(0, 1), w of N(0, 1/k), bias of N(0, 1).

    Embeddings get tables of N(0, 1) and bags that share out their lookups at random.
    """
    rng = np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16 if problem.dtype == "bfloat16" else problem.dtype)
    scale = 1 / math.sqrt(problem.k)

    def normal(rows: int, cols: int, by: float = 1.0) -> Array:
        return (rng.standard_normal((rows, cols), np.float32) * np.float32(by)).astype(dtype)

    found = []
    for rank in range(problem.world):
        mine: dict[str, Array] = {}
        if problem.op == "embedding_all_to_all":
            for i, rows in enumerate(problem.tables[rank]):
                count = problem.lookups[rank][i] if rows else 0
                mine[f"table{i}"] = normal(rows, problem.n)
                mine[f"indices{i}"] = rng.integers(0, max(rows, 1), (1, problem.lookups[rank][i]))
                mine[f"offsets{i}"] = np.sort(rng.integers(0, count + 1, (1, problem.m)))
                mine[f"offsets{i}"][0, 0] = 0
            found.append(mine)
            continue
        depth = problem.depths[rank] if problem.depths else problem.k
        mine["x"] = normal(problem.m if problem.depths else problem.rows[rank], depth)
        for i, output in enumerate(problem.outputs):
            inner = problem.m if output.axis == "contraction" else depth
            w = normal(inner, output.columns[rank], scale)
            mine.setdefault(output.operand, w.T if output.operand_transposed else w)
            if output.bias:
                mine[f"bias{i}"] = normal(1, output.columns[rank])
        found.append(mine)
    if problem.op == "matmul_all_reduce" and problem.outputs[0].bias:
        for mine in found:
            mine["bias0"] = found[0]["bias0"]  # the same on every rank
    return found


def results(problem: Problem, given: Sequence[Named]) -> list[list[Exact]]:
    """Return what every rank must get, per output."""
    if problem.op == "all_gather_matmul":
        return _gathered(problem, given)
    if problem.op in ("matmul_reduce_scatter", "matmul_all_reduce"):
        return _reduced(problem, given)
    if problem.op == "embedding_all_to_all":
        return _pooled(problem, given)
    return _exchanged(problem, given)


def judge(y: Array, exact: Exact, dtype: str) -> Verdict:
    """Compare a result of a rank with what it must be. NaN is never right."""
    if y.shape != exact.value.shape:
        return Verdict(False, math.inf)
    if not y.size:
        return Verdict(True, 0.0)
    error = np.abs(np.asarray(y, np.float64) - exact.value)
    bound = (
        UNIT_ROUNDOFF[dtype] * (np.abs(exact.value) + exact.partial)
        + SUM_FACTOR * math.sqrt(exact.terms) * 2.0**-24 * exact.magnitude
        + SMALLEST[dtype]
    )
    relative = float(np.max(error / np.maximum(exact.magnitude, np.finfo(np.float64).tiny)))
    return Verdict(bool(np.all(error <= bound)), relative)


def _wide(array: Array) -> Array:
    return np.asarray(array, np.float64)


def _exact(x: Array, w: Array, bias: Array | None = None) -> Exact:
    value, magnitude = x @ w, np.abs(x) @ np.abs(w)
    if bias is not None:
        value, magnitude = value + bias, magnitude + np.abs(bias)
    return Exact(value, magnitude, np.zeros_like(value), x.shape[1] + (bias is not None))


def _weight(problem: Problem, mine: Named, i: int) -> Array:
    w = _wide(mine[problem.outputs[i].operand])
    return w.T if problem.outputs[i].operand_transposed else w


def _bias(problem: Problem, mine: Named, i: int) -> Array | None:
    return _wide(mine[f"bias{i}"]) if problem.outputs[i].bias else None


def _gathered(problem: Problem, given: Sequence[Named]) -> list[list[Exact]]:
    x = np.concatenate([_wide(mine["x"]) for mine in given])
    found = []
    for mine in given:
        row = []
        for i, output in enumerate(problem.outputs):
            a = x.T if output.axis == "contraction" else x
            row.append(_exact(a, _weight(problem, mine, i), _bias(problem, mine, i)))
        found.append(row)
    return found


def _reduced(problem: Problem, given: Sequence[Named]) -> list[list[Exact]]:
    parts = [_exact(_wide(mine["x"]), _weight(problem, mine, 0)) for mine in given]
    value = np.sum([part.value for part in parts], axis=0)
    magnitude = np.sum([part.magnitude for part in parts], axis=0)
    partial = np.sum([np.abs(part.value) for part in parts], axis=0)
    first, found = offsets(problem.rows), []
    for rank, mine in enumerate(given):
        whole = problem.op == "matmul_all_reduce"
        rows = slice(0, problem.m) if whole else slice(first[rank], first[rank + 1])
        bias = _bias(problem, mine, 0)
        extra = 0.0 if bias is None else bias
        found.append([
            Exact(value[rows] + extra, magnitude[rows] + np.abs(extra), partial[rows],
                  problem.k + problem.world)
        ])  # fmt: skip
    return found


def _exchanged(problem: Problem, given: Sequence[Named]) -> list[list[Exact]]:
    found = []
    for rank in range(problem.world):
        blocks = []
        for s, theirs in enumerate(given):
            edges = offsets(problem.splits[s])
            x = _wide(theirs["x"])[edges[rank] : edges[rank + 1]]
            owner = rank if problem.op == "all_to_all_matmul" else s
            blocks.append(_exact(x, _weight(problem, given[owner], 0)))
        bias = _bias(problem, given[rank], 0)
        extra = 0.0 if bias is None else bias
        value = np.concatenate([block.value for block in blocks]) + extra
        magnitude = np.concatenate([block.magnitude for block in blocks]) + np.abs(extra)
        found.append([Exact(value, magnitude, np.zeros_like(value), problem.k + 1)])
    return found


def _pooled(problem: Problem, given: Sequence[Named]) -> list[list[Exact]]:
    sums, sizes, longest = [], [], 1
    for rank, mine in enumerate(given):
        for i in range(len(problem.tables[rank])):
            table, indices = _wide(mine[f"table{i}"]), mine[f"indices{i}"].ravel()
            ends = np.append(mine[f"offsets{i}"].ravel(), indices.size)
            chosen = [indices[a:b] for a, b in pairwise(ends)]
            sums.append(np.array([table[rows].sum(axis=0) for rows in chosen]))
            sizes.append(np.array([np.abs(table[rows]).sum(axis=0) for rows in chosen]))
            longest = max(longest, *(len(rows) for rows in chosen))
    value, magnitude = np.concatenate(sums, axis=1), np.concatenate(sizes, axis=1)
    first, found = offsets(problem.rows), []
    for rank in range(problem.world):
        rows = slice(first[rank], first[rank + 1])
        zero = np.zeros_like(value[rows])
        found.append([Exact(value[rows], magnitude[rows], zero, longest)])
    return found
