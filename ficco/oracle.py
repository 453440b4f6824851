"""The oracle: what an operator must give, in float64, and how far from it a result may be.

Used by `ficco run`, tests and bench alike, so that "right" means one thing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["UNIT_ROUNDOFF", "Verdict", "all_gather_matmul", "judge", "random_inputs"]

Array = npt.NDArray[Any]

# Half a unit in the last place. A result y with |x| |w| = s may differ from the exact one by
#   UNIT_ROUNDOFF[dtype] |y|  +  SUM_FACTOR sqrt(k) 2^-24 s:
# one rounding to the dtype, and a float32 sum of k terms whose errors add up as a random walk.
# Leaving out one of k terms changes y by about s / k, which this catches up to k of some 10^5.
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SUM_FACTOR = 4.0
SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}  # subnormal spacing


class Verdict(NamedTuple):
    """How a result compares. `max_rel_error` is relative to |x| |w|, elementwise."""

    ok: bool
    max_rel_error: float


def random_inputs(
    rows: Sequence[int], columns: Sequence[int], k: int, dtype: np.dtype[Any], seed: int
) -> tuple[list[Array], list[Array]]:
    """Return per rank x_r [m_r, k] of N(0, 1) and w_r [k, n_r] of N(0, 1/k)."""
    rng = np.random.default_rng(seed)
    xs = [rng.standard_normal((m, k), np.float32).astype(dtype) for m in rows]
    scale = np.float32(1 / math.sqrt(k))
    ws = [(rng.standard_normal((k, n), np.float32) * scale).astype(dtype) for n in columns]
    return xs, ws


def all_gather_matmul(xs: Sequence[Array], w: Array) -> tuple[Array, Array]:
    """Return concat(xs) . w, and |concat(xs)| . |w|, both float64 [m, n_r]."""
    x = np.concatenate([np.asarray(x, np.float64) for x in xs])
    wide = np.asarray(w, np.float64)
    return x @ wide, np.abs(x) @ np.abs(wide)


def judge(y: Array, exact: Array, magnitude: Array, dtype: str, k: int) -> Verdict:
    """Compare a result with the oracle's.

    Args:
        y: the result, of any dtype; same shape as `exact`.
        exact: the float64 result.
        magnitude: the product of absolute values.
        dtype: of the result.
        k: the number of terms of each sum.
    """
    if y.shape != exact.shape:
        return Verdict(False, math.inf)
    if not y.size:
        return Verdict(True, 0.0)
    error = np.abs(np.asarray(y, np.float64) - exact)
    bound = (
        UNIT_ROUNDOFF[dtype] * np.abs(exact)
        + SUM_FACTOR * math.sqrt(k) * 2.0**-24 * magnitude
        + SMALLEST[dtype]
    )
    relative = float(np.max(error / np.maximum(magnitude, np.finfo(np.float64).tiny)))
    return Verdict(bool(np.all(error <= bound)), relative)  # NaN compares false
