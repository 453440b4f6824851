"""Times of GEMMs on a GPU, over the space of their shapes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ficco.compute.torch_dtypes import TORCH_DTYPE
from ficco.measuring.clock import captured, device_ms
from ficco.profiling.gpu.operands import Pool, room
from ficco.profiling.gpu.ranks import Ranks
from ficco.profiling.grids import Shape, gemm_shapes, wide_shapes

__all__ = ["measure"]

_LIMITS_S = {"bfloat16": 40.0, "float32": 8.0}
_RUN_US, _LEAST_CALLS, _MOST_CALLS = 5000.0, 4, 100

Timed = tuple[int, int, int, float]


def measure(ranks: Ranks, dtype: str) -> tuple[list[Timed], int]:
    """Return points (m, n, k, us) of the median rank, by rising shape, and how many were left out.

    All ranks multiply at the same time, independently. Inputs have the layouts of x and
    linear.weight.t(). Inputs and outputs are never in the cache. Points are left out when the time
    is up.

    Args:
        ranks: all ranks take part.
        dtype: "bfloat16" or "float32".
    """
    elements = min(ranks.gather(room()))
    narrow = dtype == "bfloat16"
    shapes = gemm_shapes(elements) if narrow else wide_shapes(elements // 2)
    inputs, outputs = Pool(elements, ranks.device), Pool(elements, ranks.device)
    ranks.meet()
    times = _within(ranks, shapes, TORCH_DTYPE[dtype], inputs, outputs, _LIMITS_S[dtype])
    count = min(ranks.gather(len(times)))
    middles = ranks.middles(times[:count])
    points = [(*shape, us) for shape, us in zip(shapes[:count], middles, strict=True)]
    return sorted(points), len(shapes) - count


def _within(
    ranks: Ranks, shapes: Sequence[Shape], dtype: torch.dtype, inputs: Pool, outputs: Pool,
    limit_s: float,
) -> list[float]:  # fmt: skip
    end, times = time.monotonic() + limit_s, []
    for shape in shapes:
        if time.monotonic() > end:
            break
        times.append(_gemm_us(ranks, shape, dtype, inputs, outputs))
    return times


def _gemm_us(ranks: Ranks, shape: Shape, dtype: torch.dtype, inputs: Pool, outputs: Pool) -> float:
    m, n, k = shape

    def multiply() -> None:
        a, w = inputs.take(m, k, dtype), inputs.take(n, k, dtype)
        torch.mm(a, w.t(), out=outputs.take(m, n, dtype))

    multiply()
    torch.cuda.synchronize()
    once = max(1.0, 1e3 * device_ms(multiply))
    calls = int(min(_MOST_CALLS, max(_LEAST_CALLS, _RUN_US / once)))

    def run() -> None:
        for _ in range(calls):
            multiply()

    return ranks.replayed(captured(run), calls, together=False)
