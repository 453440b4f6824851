"""Failures and calls of a group in words, for error messages.

The native core records the first failure of a group. The functions return errors; none raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ficco.core.errors import EngineError, TimeoutExceeded, shown
from ficco.operators.problem import Problem
from ficco.plan import Signal, signal_at
from ficco.plan.schedule import Schedule

ALIKE = (
    "All ranks must make the same call: the same operator, rows (pass rows= if shards are uneven), "
    "splits, k or n, dtype and schedule, and a bias on all ranks or on none (if columns or depths "
    "differ, name a schedule, because auto may choose differently per rank; in a model that "
    "overlaps: the same modes and hooks on its layers, or share=False; ficco.tune on "
    "all ranks or on none)"
)

CLOSED = (
    "the group was closed before this call had ended, by ficco.close() in another thread or by the "
    "end of the program; a new call on every rank opens it again"
)

GONE = "Restart the processes, or make a new group of the remaining ranks."

# rank, row of its program, rank of the word, place of the word, kind, seconds, found value,
# expected value; see `Group.failure` in ficco/_native.pyi.
Failure = tuple[int, int, int, int, str, float, int, int]


def failed_word(failure: Failure) -> Signal | None:
    """Return the word whose wait failed; None if it is unknown or the wait was for a step."""
    _, _, word_rank, place, kind, *_ = failure
    return signal_at(word_rank, place) if kind == "timeout" and min(word_rank, place) >= 0 else None


def differing_digests(failure: Failure) -> dict[int, int]:
    """Return the digests of two ranks' calls, by rank, if the calls differ; else an empty dict."""
    rank, _, peer, _, kind, _, peer_digest, own_digest = failure
    return {rank: own_digest, peer: peer_digest} if kind == "differs" else {}


def raiser_of(word: Signal) -> int:
    """Return the rank that raises a word."""
    return word.rank if word.name == "ready" else word.peer


def refused_in_words(rank: int, reason: str) -> str:
    """Return a sentence that says which rank refuses the call, and why."""
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
    """Return the error that describes a failure.

    Args:
        failure: as the native core records it.
        step_name: returns the name of a row of a rank's program.
        remedy: the call that makes the group usable again.
        timeout_s: the longest time a wait may last.
        notes: sentences about the state of the ranks, each with a full stop; may be empty.
        refusal: the reason why the rank refused a call, if it did.
        gone: whether a rank has left for good, so the group cannot be reset.
    """
    rank, row, word_rank, place, kind, seconds, value, expected = failure
    notes = f" {notes}" if notes else ""
    if kind == "refused":
        return EngineError(
            f"{refused_in_words(rank, refusal)} Rank {word_rank} has begun it, as call number "
            f"{value + 1} of the group.{notes} Call {remedy} to go on."
        )
    remedy = GONE if gone else f"Call {remedy} to go on."
    if kind == "differs":
        mismatch = f"rank {rank} runs another call than rank {word_rank}"
        return EngineError(f"{mismatch}.{notes} {ALIKE}. {remedy}")
    if kind == "stopped":
        why = notes or f" The error on rank {rank} says why."
        return EngineError(f"rank {rank} stopped.{why} {remedy}")
    reset = remedy
    if not gone:
        remedy = f"timeout_s is {timeout_s:g}: increase it if the machine is slow. {remedy}"
    step = step_name(rank, row) if row >= 0 else "no longer known"
    word = failed_word(failure)
    if word is None and place < 0:
        reason = ", because the memory of its GPU could not be read" if word_rank >= 0 else ""
        hint = f"The signal is not known{reason}."
        return TimeoutExceeded(rank, step, "a signal", seconds, f"{hint}{notes} {remedy}")
    if word is None:
        waited = f"step {step_name(rank, place)!r}"
        return TimeoutExceeded(rank, step, waited, seconds, f"{notes.strip()} {remedy}".strip())
    hint = f"Rank {raiser_of(word)} should have set it"
    if value != 0:
        hint += f", but raised {value} instead of {expected}: it runs another call"
        remedy = f"{ALIKE}. {reset}"
    return TimeoutExceeded(rank, step, f"signal {word}", seconds, f"{hint}.{notes} {remedy}")


def call_in_words(p: Problem, schedule: Schedule | None, rank: int, own: bool = True) -> str:
    """Return a sentence about a rank's call.

    Args:
        p: the problem.
        schedule: the schedule; None: "auto", which is not chosen yet.
        rank: the rank that makes the call.
        own: whether this process is that rank, and so knows all sizes.
    """
    sizes = f"{p.m}x{p.n}x{p.k}" if own else f"{p.m} rows, {p.agreed()['width']} columns to send"
    sizes += " with a bias" if p.has_bias else ""
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
