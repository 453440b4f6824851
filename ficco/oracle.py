"""The oracle: what an operator must give, in float64, and how far from it a result may be.

Used by `ficco run`, tests and bench alike, so that "right" means one thing. Arrays are NumPy's, or
PyTorch's tensors, which are judged on the device where they lie; PyTorch is not loaded for that.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ficco.problem import REDUCING, Problem, offsets

__all__ = [
    "UNIT_ROUNDOFF",
    "Draw",
    "Exact",
    "Verdict",
    "bytes_needed",
    "inputs",
    "judge",
    "results",
    "roundings",
]

Array = Any  # of NumPy, or a tensor of PyTorch
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
        partial: an upper bound of the absolute rounding of partial sums that travelled; [1, 1]
            where none did.
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


class Draw(Protocol):
    """Draws random arrays, one after another."""

    def normal(self, rows: int, cols: int, scale: float = 1.0) -> Array:
        """Return [rows, cols] of N(0, scale^2) in the problem's dtype."""

    def integers(self, below: int, count: int) -> Array:
        """Return [1, count] of int64 from 0 to below-1, equally likely."""

    def rising(self, below: int, count: int) -> Array:
        """Return such integers in rising order, of which the first is 0."""


class _NumpyDraw:
    """Draws NumPy arrays."""

    def __init__(self, dtype: str, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def normal(self, rows: int, cols: int, scale: float = 1.0) -> npt.NDArray[Any]:
        """See `Draw.normal`."""
        drawn = self._rng.standard_normal((rows, cols), np.float32) * np.float32(scale)
        return drawn.astype(self._dtype)

    def integers(self, below: int, count: int) -> npt.NDArray[Any]:
        """See `Draw.integers`."""
        return self._rng.integers(0, below, (1, count))

    def rising(self, below: int, count: int) -> npt.NDArray[Any]:
        """See `Draw.rising`."""
        drawn = np.sort(self._rng.integers(0, below, (1, count)))
        drawn[0, 0] = 0
        return drawn


def inputs(problem: Problem, seed: int, draw: Draw | None = None) -> list[dict[str, Array]]:
    """Return per rank random inputs by buffer name: x of N(0, 1), w of N(0, 1/k), bias of N(0, 1).

    Embeddings get tables of N(0, 1) and bags that share out their lookups at random. `draw` serves
    for arrays of other libraries; it has a seed of its own.
    """
    draw = draw or _NumpyDraw(problem.dtype, seed)
    scale = 1 / math.sqrt(problem.k)
    found = []
    for rank in range(problem.world):
        mine: dict[str, Array] = {}
        if problem.op == "embedding_all_to_all":
            for i, rows in enumerate(problem.tables[rank]):
                count = problem.lookups[rank][i] if rows else 0
                mine[f"table{i}"] = draw.normal(rows, problem.n)
                mine[f"indices{i}"] = draw.integers(max(rows, 1), problem.lookups[rank][i])
                mine[f"offsets{i}"] = draw.rising(count + 1, problem.m)
            found.append(mine)
            continue
        depth = problem.depths[rank] if problem.depths else problem.k
        if problem.op in REDUCING:
            for x, _, each in problem.pairs_of(rank):
                mine[x] = draw.normal(problem.m, each)
        else:
            mine["x"] = draw.normal(problem.rows[rank], depth)
        for i, output in enumerate(problem.outputs):
            if output.axis == "gathered":
                continue
            weights = [(output.operand, problem.m if output.axis == "contraction" else depth)]
            if problem.op in REDUCING:
                weights = [(name, each) for _, name, each in problem.pairs_of(rank)]
            for name, inner in weights:
                w = draw.normal(inner, output.columns[rank], scale)
                mine.setdefault(name, w.T if output.operand_transposed else w)
            if output.bias:
                mine[f"bias{i}"] = draw.normal(1, output.columns[rank])
        found.append(mine)
    if problem.op == "matmul_all_reduce" and problem.outputs[0].bias:
        for mine in found:
            mine["bias0"] = found[0]["bias0"]  # the same on every rank
    return found


def bytes_needed(problem: Problem, ranks: Sequence[int] | None = None) -> int:
    """Return the bytes that `inputs`, and `results` of so many ranks, hold at least."""
    p, elements = problem, 0
    for rank in range(p.world):
        if p.op == "embedding_all_to_all":
            elements += sum(p.tables[rank]) * p.n
            continue
        depth = p.depths[rank] if p.depths else p.k
        elements += (p.m if p.op in REDUCING else p.rows[rank]) * depth
        for output in p.products:
            inner = p.m if output.axis == "contraction" else depth
            elements += inner * output.columns[rank]
    bags = sum(sum(row) for row in p.lookups) + p.m * sum(len(row) for row in p.tables)
    wanted = range(p.world) if ranks is None else ranks
    results = sum(height * width for rank in wanted for height, width in p.result_shapes(rank))
    exact = 2 * 8  # bytes of a value and its magnitude, in float64
    return elements * p.itemsize + bags * 8 + results * (p.itemsize + exact)


def results(
    problem: Problem, given: Sequence[Named], ranks: Sequence[int] | None = None
) -> list[list[Exact]]:
    """Return what each of `ranks` (None: every rank) must get, per output."""
    wanted = range(problem.world) if ranks is None else ranks
    if problem.op == "all_gather_matmul":
        return _gathered(problem, given, wanted)
    if problem.op in REDUCING:
        return _reduced(problem, given, wanted)
    if problem.op == "embedding_all_to_all":
        return [_pooled(problem, given, rank) for rank in wanted]
    return [_exchanged(problem, given, rank) for rank in wanted]


def judge(y: Array, exact: Exact, dtype: str, roundings: int = 1) -> Verdict:
    """Compare a result of a rank with what it must be. NaN is never right.

    Args:
        y: the result.
        exact: what it must be, on the same device.
        dtype: of the result.
        roundings: how often a sum that travelled was rounded to the dtype: once where each rank
            sends its own; as often as there are ranks where it is added to on the way, by a
            collective or along a ring; see the function of this name.
    """
    if tuple(y.shape) != tuple(exact.value.shape):
        return Verdict(False, math.inf)
    if not math.prod(y.shape):
        return Verdict(True, 0.0)
    error = abs(_wide(y) - exact.value)
    bound = (
        UNIT_ROUNDOFF[dtype] * (abs(exact.value) + roundings * exact.partial)
        + SUM_FACTOR * math.sqrt(exact.terms) * 2.0**-24 * exact.magnitude
        + SMALLEST[dtype]
    )
    relative = float((error / exact.magnitude.clip(min=sys.float_info.min)).max())
    return Verdict(bool((error <= bound).all()), relative)


def roundings(problem: Problem, sums_travel: bool) -> int:
    """Return how often what travels is rounded: sums at every rank, parts of them once.

    And once more for every further pair of x and w.
    """
    further = max(map(len, problem.pairs), default=1) - 1
    if problem.op in REDUCING and sums_travel:
        return problem.world * (1 + 2 * further)  # what comes is added before the last product
    return 1 + further


def _library(array: Array) -> Any:
    """Return the library of an array; what is called of it, both libraries call alike."""
    return np if isinstance(array, np.ndarray) else sys.modules["torch"]


def _wide(array: Array) -> Array:
    if isinstance(array, np.ndarray):
        return np.asarray(array, np.float64)
    return array.double()


def _none(value: Array) -> Array:
    """Return a zero that goes with every element of a matrix, which takes no memory."""
    return _library(value).zeros_like(value[:1, :1])


def _exact(x: Array, w: Array, bias: Array | None = None) -> Exact:
    value, magnitude = x @ w, abs(x) @ abs(w)
    if bias is not None:
        value, magnitude = value + bias, magnitude + abs(bias)
    return Exact(value, magnitude, _none(value), x.shape[1] + (bias is not None))


def _weight(problem: Problem, mine: Named, i: int) -> Array:
    w = _wide(mine[problem.outputs[i].operand])
    return w.T if problem.outputs[i].operand_transposed else w


def _bias(problem: Problem, mine: Named, i: int) -> Array | None:
    return _wide(mine[f"bias{i}"]) if problem.outputs[i].bias else None


def _gathered(problem: Problem, given: Sequence[Named], ranks: Sequence[int]) -> list[list[Exact]]:
    x = _library(given[0]["x"]).concatenate([_wide(mine["x"]) for mine in given])
    found = []
    for mine in (given[rank] for rank in ranks):
        row = []
        for i, output in enumerate(problem.outputs):
            if output.axis == "gathered":
                row.append(Exact(x, abs(x), _none(x), 0))
                continue
            a = x.T if output.axis == "contraction" else x
            row.append(_exact(a, _weight(problem, mine, i), _bias(problem, mine, i)))
        found.append(row)
    return found


def _reduced(problem: Problem, given: Sequence[Named], ranks: Sequence[int]) -> list[list[Exact]]:
    whole = problem.op == "matmul_all_reduce"
    first = offsets(problem.rows)
    begin, end = (0, problem.m) if whole else (first[min(ranks)], first[max(ranks) + 1])
    value: Array = 0.0
    magnitude: Array = 0.0
    partial: Array = 0.0
    turned = problem.outputs[0].operand_transposed
    for rank, mine in enumerate(given):  # all rows that some of the ranks want, once
        for x, w, _ in problem.pairs_of(rank):
            b = _wide(mine[w])
            part = _exact(_wide(mine[x][begin:end]), b.T if turned else b)
            value = value + part.value
            magnitude = magnitude + part.magnitude
            partial = partial + abs(part.value)
    found = []
    for rank in ranks:
        rows = slice(0, end) if whole else slice(first[rank] - begin, first[rank + 1] - begin)
        bias = _bias(problem, given[rank], 0)
        extra = 0.0 if bias is None else bias
        along = whole or problem.pairs  # a bias may be rounded on the way, too
        travelled = partial[rows] + abs(extra) if along else partial[rows]
        found.append([
            Exact(value[rows] + extra, magnitude[rows] + abs(extra), travelled,
                  problem.k + problem.world)
        ])  # fmt: skip
    return found


def _exchanged(problem: Problem, given: Sequence[Named], rank: int) -> list[Exact]:
    blocks = []
    for s, theirs in enumerate(given):
        edges = offsets(problem.splits[s])
        x = _wide(theirs["x"][edges[rank] : edges[rank + 1]])
        owner = rank if problem.op == "all_to_all_matmul" else s
        blocks.append(_exact(x, _weight(problem, given[owner], 0)))
    bias = _bias(problem, given[rank], 0)
    extra = 0.0 if bias is None else bias
    library = _library(blocks[0].value)
    value = library.concatenate([block.value for block in blocks]) + extra
    magnitude = library.concatenate([block.magnitude for block in blocks]) + abs(extra)
    return [Exact(value, magnitude, _none(value), problem.k + 1)]


def _pooled(problem: Problem, given: Sequence[Named], rank: int) -> list[Exact]:
    first = offsets(problem.rows)
    begin, end = first[rank], first[rank + 1]
    values, magnitudes, longest = [], [], 1
    for mine, tables in zip(given, problem.tables, strict=True):
        for i in range(len(tables)):
            table, indices = _wide(mine[f"table{i}"]), mine[f"indices{i}"].ravel()
            edges = [*mine[f"offsets{i}"].ravel()[begin : end + 1].tolist(), len(indices)]
            edges = edges[: end - begin + 1]
            values.append(_bags(table, indices, edges))
            magnitudes.append(_bags(abs(table), indices, edges))
            longest = max(longest, *(b - a for a, b in pairwise(edges)), 1)
    library = _library(values[0])
    value = library.concatenate(values, axis=1)
    magnitude = library.concatenate(magnitudes, axis=1)
    return [Exact(value, magnitude, _none(value), longest)]


def _bags(table: Array, indices: Array, edges: Sequence[int]) -> Array:
    """Return sums of the table's rows; bag i has the indices from edges[i] to edges[i+1]."""
    if isinstance(table, np.ndarray):
        sums = [table[indices[a:b]].sum(axis=0) for a, b in pairwise(edges)]
        return np.array(sums).reshape(len(edges) - 1, table.shape[1])
    chosen = indices[edges[0] : edges[-1]]
    if not len(chosen):
        return table.new_zeros((len(edges) - 1, table.shape[1]))
    starts = chosen.new_tensor(edges[:-1]) - edges[0]
    return _library(table).nn.functional.embedding_bag(chosen, table, starts, mode="sum")
