"""What a rank's bound program is on every engine."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ficco.core.dtypes import ELEMENT_BYTES
from ficco.plan import copy_unit
from ficco.plan.timeline import Span
from ficco.program import Copy, Launch, Program
from ficco.program.encoding import Row, trace_rows


class BoundProgram:
    """A rank's program, bound to windows and ready to run with any matrices of its shapes.

    Args:
        program: of the rank.
        compute: the library.

    Attributes:
        program: as it was compiled.
    """

    def __init__(self, program: Program, compute: Any) -> None:
        self.program, self._compute = program, compute
        self._buffers = {buffer.name: buffer for buffer in program.buffers}

    @functools.cached_property
    def rows(self) -> list[Row]:
        """The meaning of each row of the trace."""
        return trace_rows(self.program)

    @property
    def captured(self) -> bool:
        """Whether a graph has captured a call of the program, so that its window must stay."""
        return False

    def fill_nan(self, arrays: Mapping[str, Any]) -> None:
        """Fill the outputs of a failed call with NaN, so that they do not look like results."""
        for buffer in self.program.buffers:
            if buffer.role == "output" and buffer.name in arrays:
                self._fill_nan(arrays[buffer.name])

    def _fill_nan(self, array: Any) -> None:
        self._compute.fill_nan(array)


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
