"""The first failure of a group, as the native core recorded it, in words. Nothing raises here."""

from __future__ import annotations

from collections.abc import Callable

from ficco.errors import EngineError, TimeoutExceeded
from ficco.plan import Signal, signal_at

__all__ = [
    "ALIKE", "GONE", "Failure", "awaited_word", "differing", "error_of", "raiser_of",
    "refused_in_words",
]  # fmt: skip

ALIKE = (
    "Ranks must call alike: the same operator, rows (pass rows= where shards are uneven), k or n, "
    "dtype and schedule (where columns or depths differ, name a schedule, for auto may not agree; "
    "in a model that overlaps: the same modes and hooks on its layers, or share=False)"
)

GONE = "Restart the processes, or make a new group of the ranks that are left."

# rank, row of its program, word's rank, word's place, kind, seconds, found, wanted; see
# `Group.failure` in ficco/_native.pyi.
Failure = tuple[int, int, int, int, str, float, int, int]


def awaited_word(failure: Failure) -> Signal | None:
    """Return the word whose wait failed; None where it is not known, or was a step, or nothing."""
    _, _, word_rank, place, kind, *_ = failure
    return signal_at(word_rank, place) if kind == "timeout" and min(word_rank, place) >= 0 else None


def differing(failure: Failure) -> dict[int, int]:
    """Return the digests of two ranks' calls, by rank, where they differ; else nothing."""
    rank, _, peer, _, kind, _, found, wanted = failure
    return {rank: wanted, peer: found} if kind == "differs" else {}


def raiser_of(word: Signal) -> int:
    """Return the rank that raises a word."""
    return word.rank if word.name == "ready" else word.peer


def refused_in_words(rank: int, reason: str) -> str:
    """Return a sentence on a rank that does not make a call which other ranks make."""
    return f"rank {rank} does not make the call that other ranks make: {reason.rstrip('.')}."


def error_of(
    failure: Failure,
    step_name: Callable[[int, int], str],
    remedy: str,
    timeout_s: float,
    notes: str = "",
    refusal: str = "",
    gone: bool = False,
) -> EngineError:
    """Return the error that says it.

    Args:
        failure: as recorded.
        step_name: the name of a row of a rank's program.
        remedy: what makes the group usable again.
        timeout_s: how long a wait may last.
        notes: sentences on what is known of the ranks, each with a full stop; may be empty.
        refusal: why the rank refused a call, where it did.
        gone: whether a rank has left for good, so that the group cannot be reset.
    """
    rank, row, word_rank, place, kind, seconds, found, wanted = failure
    notes = f" {notes}" if notes else ""
    if kind == "refused":
        return EngineError(
            f"{refused_in_words(rank, refusal)} Rank {word_rank} has begun it, as call number "
            f"{found + 1} of the group.{notes} Call {remedy} to go on."
        )
    remedy = GONE if gone else f"Call {remedy} to go on."
    if kind == "differs":
        said = f"rank {rank} runs another call than rank {word_rank}"
        return EngineError(f"{said}.{notes} {ALIKE}. {remedy}")
    if kind == "stopped":
        return EngineError(f"rank {rank} stopped.{notes} {remedy}")
    reset = remedy
    if not gone:
        remedy = f"timeout_s is {timeout_s:g}: raise it if the machine is slow. {remedy}"
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
        remedy = f"{ALIKE}. {reset}"
    return TimeoutExceeded(rank, step, f"signal {word}", seconds, f"{hint}.{notes} {remedy}")
