"""Reductions as sums in one pass over the slots of a window."""

from __future__ import annotations

from ficco.plan import Region
from ficco.program import Sum
from ficco.program.passes.gemms import distance_of


def sum_of(reads: tuple[Region, ...], target: Region) -> Sum | None:
    """Return a reduction as one pass, or None if it needs more."""
    bias = reads[-1] if len(reads) > 1 and reads[-1].rows == 1 < target.rows else None
    terms = reads[:-1] if bias is not None else reads
    if len(terms) == 1:
        return Sum(terms[0], 0, 0, terms[0], 0, bias, target)
    for at, own in enumerate(terms):
        slots = terms[:at] + terms[at + 1 :]
        distance = distance_of(slots)
        if slots and distance is not None and own.buffer != slots[0].buffer:
            return Sum(slots[0], len(slots), distance, own, at, bias, target)
    return None
