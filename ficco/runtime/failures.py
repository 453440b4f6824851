"""The first failure of a group, as the native core recorded it, in words. Nothing raises here."""

from __future__ import annotations

from collections.abc import Callable

from ficco.errors import EngineError, TimeoutExceeded
from ficco.plan import Word, word_at

__all__ = ["ALIKE", "Failure", "awaited_word", "differing", "error_of", "raiser_of"]

ALIKE = (
    "Ranks must call alike: the same operator, rows (pass rows= where shards are uneven), k or n, "
    "dtype and schedule (where columns or depths differ, name a schedule, for auto may not agree; "
    "in a model that overlaps: the same modes and hooks on its layers, or share=False)"
)

# rank, row of its program, word's rank, word's place, kind, seconds, found, wanted; see
# `Group.failure` in ficco/_native.pyi.
Failure = tuple[int, int, int, int, str, float, int, int]


def awaited_word(failure: Failure) -> Word | None:
    """Return the word whose wait failed; None where it is not known, or was a step, or nothing."""
    _, _, word_rank, place, kind, *_ = failure
    return word_at(word_rank, place) if kind == "timeout" and min(word_rank, place) >= 0 else None


def differing(failure: Failure) -> dict[int, int]:
    """Return the digests of two ranks' calls, by rank, where they differ; else nothing."""
    rank, _, peer, _, kind, _, found, wanted = failure
    return {rank: wanted, peer: found} if kind == "differs" else {}


def raiser_of(word: Word) -> int:
    """Return the rank that raises a word."""
    return word.rank if word.name == "ready" else word.peer


def error_of(
    failure: Failure, step_name: Callable[[int, int], str], remedy: str, notes: str = ""
) -> EngineError:
    """Return the error that says it.

    Args:
        failure: as recorded.
        step_name: the name of a row of a rank's program.
        remedy: what makes the group usable again.
        notes: sentences on what is known of the ranks, each with a full stop; may be empty.
    """
    rank, row, word_rank, place, kind, seconds, found, wanted = failure
    notes = f" {notes}" if notes else ""
    if kind == "differs":
        said = f"rank {rank} runs another call than rank {word_rank}"
        return EngineError(f"{said}.{notes} {ALIKE}; call {remedy} to go on.")
    if kind == "stopped":
        return EngineError(f"rank {rank} stopped.{notes} Call {remedy} to go on.")
    reset, remedy = remedy, f"Raise timeout_s if the machine is slow; call {remedy} to go on."
    step = step_name(rank, row) if row >= 0 else "not known any more"
    word = awaited_word(failure)
    if word is None and place < 0:
        reason = ", as the memory of its GPU could not be read" if word_rank >= 0 else ""
        hint = f"Which one is not known{reason}."
        return TimeoutExceeded(rank, step, "a signal", seconds, f"{hint}{notes} {remedy}")
    if word is None:
        waited = f"step {step_name(rank, place)!r}"
        return TimeoutExceeded(rank, step, waited, seconds, f"{notes.strip()} {remedy}".strip())
    hint = f"Rank {raiser_of(word)} should have raised it"
    if found != 0:
        hint += f", and raised {found} where {wanted} was expected: it runs another call"
        remedy = f"{ALIKE}; call {reset} to go on."
    return TimeoutExceeded(rank, step, f"signal {word}", seconds, f"{hint}.{notes} {remedy}")
