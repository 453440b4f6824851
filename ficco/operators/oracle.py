"""The oracle: the exact results of an operator in float64, and the allowed error of a result.

`ficco run`, tests and bench all use it, so that they agree on correctness. Arrays are NumPy arrays
or PyTorch tensors. Tensors are compared on their own device; this module does not load PyTorch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ficco.core.dtypes import ELEMENT_BYTES
from ficco.operators.problem import Problem
from ficco.operators.reference import wide
from ficco.operators.registry import Array, Arrays, Draw, Exact, Operand

__all__ = [
    "UNIT_ROUNDOFF",
    "Draw",
    "Exact",
    "Verdict",
    "bytes_needed",
    "inputs",
    "judge",
    "judged",
    "results",
    "roundings",
]

# Half a unit in the last place. With s = |x| |w| a result y may differ from the exact one by
#   roundings * UNIT_ROUNDOFF[dtype] |y|  +  SUM_FACTOR sqrt(terms) 2^-24 s:
# the roundings to the dtype, and a float32 sum whose errors add up as a random walk. Partial sums
# that travel in the dtype are rounded relative to their size, which s / sqrt(ranks) bounds well.
# Omitting one of k terms changes y by about s / k; this bound detects it up to k of about 10^5.
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SUM_FACTOR = 4.0
SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}  # subnormal spacing


class Verdict(NamedTuple):
    """The comparison of a result. `max_rel_error` is relative to |x| |w|, elementwise."""

    ok: bool
    max_rel_error: float


class _NumpyDraw:
    """Draws NumPy arrays."""

    def __init__(self, dtype: str, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._dtype = dtype

    def normal(self, rows: int, cols: int, scale: float = 1.0, dtype: str = "") -> npt.NDArray[Any]:
        """See `Draw.normal`."""
        name = dtype or self._dtype
        drawn = self._rng.standard_normal((rows, cols), np.float32) * np.float32(scale)
        return drawn.astype(ml_dtypes.bfloat16 if name == "bfloat16" else name)

    def integers(self, below: int, count: int, dtype: str = "int64") -> npt.NDArray[Any]:
        """See `Draw.integers`."""
        return self._rng.integers(0, below, (1, count)).astype(dtype)

    def rising(self, below: int, count: int, dtype: str = "int64") -> npt.NDArray[Any]:
        """See `Draw.rising`."""
        drawn = np.sort(self.integers(below, count, dtype))
        drawn[0, 0] = 0
        return drawn


def inputs(problem: Problem, seed: int, draw: Draw | None = None) -> list[dict[str, Array]]:
    """Return per rank random inputs by buffer name: x of N(0, 1), w of N(0, 1/k), bias of N(0, 1).

    Embeddings get tables of N(0, 1) and bags of random length. `draw` makes arrays of other
    libraries; it has its own seed.
    """
    draw = draw or _NumpyDraw(problem.dtype, seed)
    drawn: list[dict[str, Array]] = []
    together = None if problem.operator.drawn is None else problem.operator.drawn(problem, draw)
    for rank in range(problem.world):
        operands = {operand.name: operand for operand in problem.operands(rank)}
        given = {} if together is None else together[rank]
        arrays = {
            name: given[name] if name in given else _drawn(problem, operand, operands, draw)
            for name, operand in operands.items()
            if operand.role != "output"
        }
        for name in arrays:
            if operands[name].role in problem.operator.alike and drawn:
                arrays[name] = drawn[0][name]
        drawn.append(arrays)
    return drawn


def _drawn(problem: Problem, operand: Operand, others: Mapping[str, Operand], draw: Draw) -> Array:
    """Draw an operand by its role."""
    _, role, rows, cols, dtype, follows = operand
    if role == "indices":
        return draw.integers(max(others[follows].rows, 1), cols, dtype)
    if role == "offsets":
        beside = [one for one in others.values() if one.follows == follows]
        lookups = next(one.cols for one in beside if one.role == "indices")
        return draw.rising((lookups if others[follows].rows else 0) + 1, cols, dtype)
    return draw.normal(
        rows, cols, 1 / math.sqrt(problem.k) if role in ("weight", "experts") else 1.0, dtype
    )


def bytes_needed(problem: Problem, ranks: Sequence[int] | None = None) -> int:
    """Return the least bytes of `inputs`, and of `results` for `ranks` (None: every rank)."""
    p, input_bytes = problem, 0
    for rank in range(p.world):
        for operand in p.operands(rank):
            if operand.role != "output":
                input_bytes += operand.rows * operand.cols * ELEMENT_BYTES[operand.dtype]
    wanted = range(p.world) if ranks is None else ranks
    results = sum(height * width for rank in wanted for height, width in p.result_shapes(rank))
    exact = 2 * 8  # bytes of a value and its magnitude, in float64
    return input_bytes + results * (p.result_itemsize + exact)


def results(
    problem: Problem, arrays: Sequence[Arrays], ranks: Sequence[int] | None = None
) -> list[list[Exact]]:
    """Return the exact results of each of `ranks` (None: every rank), per output."""
    wanted = range(problem.world) if ranks is None else ranks
    return problem.operator.reference(problem, arrays, wanted)


def judge(y: Array, exact: Exact, dtype: str, roundings: int = 1) -> Verdict:
    """Compare a result of a rank with the exact one. NaN is always wrong.

    Args:
        y: the result.
        exact: the exact result, on the same device.
        dtype: dtype of the result.
        roundings: how often a sum that travels is rounded to the dtype: once if each rank sends
            only its own part; once per rank if ranks add to it on the way, in a collective or on a
            ring. See `roundings`.
    """
    if tuple(y.shape) != tuple(exact.value.shape):
        return Verdict(False, math.inf)
    if not math.prod(y.shape):
        return Verdict(True, 0.0)
    error = abs(wide(y) - exact.value)
    bound = (
        UNIT_ROUNDOFF[dtype] * (abs(exact.value) + roundings * exact.partial)
        + SUM_FACTOR * math.sqrt(exact.terms) * 2.0**-24 * exact.magnitude
        + SMALLEST[dtype]
    )
    relative = float((error / exact.magnitude.clip(min=sys.float_info.min)).max())
    return Verdict(bool((error <= bound).all()), relative)


def judged(
    problem: Problem, outputs: Sequence[Sequence[Array]], exact: Sequence[Sequence[Exact]],
    sums_travel: bool,
) -> Verdict:  # fmt: skip
    """Compare all results of some ranks with the exact ones; the largest error counts."""
    verdicts = [
        judge(y, right, problem.dtype, roundings(problem, sums_travel))
        for ys, rights in zip(outputs, exact, strict=True)
        for y, right in zip(ys, rights, strict=True)
    ]
    error = max((each.max_rel_error for each in verdicts), key=lambda e: (math.isnan(e), e))
    return Verdict(all(each.ok for each in verdicts), error)


def roundings(problem: Problem, sums_travel: bool) -> int:
    """Return how often data that travels is rounded: sums at every rank, parts of sums once.

    Every further pair of x and w adds one rounding.
    """
    further = max(map(len, problem.pairs), default=1) - 1
    if problem.flow.adds_by_library and sums_travel:
        return problem.world * (1 + 2 * further)  # arrivals are added before the last product
    return 1 + further
