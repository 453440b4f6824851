"""Spans of a timeline from the recorded times of a program's rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ficco.dtypes import ELEMENT_BYTES
from ficco.encoding import Row
from ficco.plan import copy_unit
from ficco.program import Copy, Launch, Program
from ficco.timeline import Span

__all__ = ["spans_of"]


def spans_of(program: Program, rows: Sequence[Row], times: npt.NDArray[np.int64]) -> list[Span]:
    """Return the spans of all rows that ran.

    Args:
        program: of one rank.
        rows: of its trace.
        times: start and end of every row in ns of the monotonic clock; an end of 0: it did not run.

    Returns:
        Spans in us of the monotonic clock.
    """
    item = {buffer.name: ELEMENT_BYTES[buffer.dtype] for buffer in program.buffers}
    spans = []
    for (name, entry, kind), (begin, end) in zip(rows, times.tolist(), strict=True):
        if not end:
            continue
        moved, unit = 0, "none"
        if isinstance(entry, Copy) and kind != "wait":
            within = entry.source.rank == entry.target.rank
            unit = copy_unit(program.target.name, same_device=within)
            moved = 0 if within else entry.source.area * item[entry.source.buffer]
        elif isinstance(entry, Launch) and kind != "wait":
            unit = "sm"
        spans.append(
            Span(program.rank, entry.lane, name, kind, unit, begin / 1e3, end / 1e3, moved)
        )
    return spans
