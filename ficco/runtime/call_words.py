"""Sentences about the calls of ranks, for messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ficco.errors import shown
from ficco.problem import Problem
from ficco.schedule import Schedule

__all__ = ["call_in_words", "known_calls_in_words"]


def call_in_words(p: Problem, schedule: Schedule | None, rank: int, own: bool = True) -> str:
    """Return a sentence about a rank's call.

    Args:
        p: the problem.
        schedule: the schedule; None: "auto", which is not chosen yet.
        rank: the rank that makes the call.
        own: whether this process is that rank, and so knows all sizes.
    """
    sizes = f"{p.m}x{p.n}x{p.k}" if own else f"{p.m} rows, {p.agreed()['width']} columns to send"
    if p.splits:
        sizes += f", splits {shown([list(row) for row in p.splits])}"
    if p.tables:
        sizes += f", tables {[len(row) for row in p.tables]} by rank"
    way = "auto" if schedule is None else f"{schedule.name}, grain {schedule.grain_text}"
    return f"Rank {rank} runs {p.op} of {sizes}, rows {list(p.rows)}, {p.dtype}, by {way}."


def known_calls_in_words(known: Iterable[Any], digests: Mapping[int, int], own: int) -> list[str]:
    """Return a sentence about each rank's call whose digest this rank knows.

    Digests leave out sizes that only the rank itself knows, and so do sentences about others.

    Args:
        known: calls that this rank can make, with `problem`, `schedule` and `digest`.
        digests: of the ranks' calls, by rank.
        own: this rank.
    """
    calls = {call.digest: call for call in known}
    return [
        call_in_words(calls[digest].problem, calls[digest].schedule, rank, rank == own)
        for rank, digest in digests.items()
        if digest in calls
    ]
