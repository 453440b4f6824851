"""Times of launches of ficco's products: at least those of the rounds of their tiles."""

from __future__ import annotations

from collections.abc import Sequence

from ficco.core.dtypes import ELEMENT_BYTES
from ficco.core.machine import Machine
from ficco.program.tiling import work_of

__all__ = ["with_rounds"]


def with_rounds(
    machine: Machine, dtype: str, rows: Sequence[float], cols: Sequence[int], k: int,
    whole_us: float, last_us: float, split: bool = True,
) -> tuple[float, float]:  # fmt: skip
    """Return the time of a launch and that of its last part alone, at least those of its rounds.

    Few columns or rows give fewer tiles than multiprocessors, the last tiles of parts are partly
    empty, and each part reads all of the weight.

    Args:
        machine: the machine.
        dtype: of the operands.
        rows: of every part.
        cols: likewise.
        k: depth.
        whole_us: time of the launch in us, without rounds.
        last_us: likewise, of its last part.
        split: whether tiles may be split.
    """
    times = machine.gemm_times(dtype)
    if times is None or not times.tiled or machine.engine != "cuda" or not k:
        return whole_us, last_us
    heights = [max(1, round(height)) if height else 0 for height in rows]
    work = work_of(heights, cols, ELEMENT_BYTES[dtype], times.units, k, split)
    if not work.whole:
        return whole_us, last_us
    return times.gated_us(whole_us, work.whole, k), times.gated_us(last_us, work.last, k)
