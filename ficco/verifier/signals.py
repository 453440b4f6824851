"""Signals: each has one raiser, waiters on one rank, one clearer, and a fixed state between calls.

Between calls all signals are 0 except `free`, which is 1 or will be raised by the reader's previous
call. Behind its clear, and in the same lane, a wait for `free` is for the one that a peer raises in
this call, which stays raised for the next call. `check_uses` checks the rules that need no order of
events; `check_words` the others.

`entered` alone says which call a rank makes: it carries the digest, which a wait step compares.
Data arrive from any call, so what they imply in this plan does not replace the comparison. See
`check_entries`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ficco.plan import SHARED, SIGNALS, Plan, Signal, has_mailbox
from ficco.verifier.form import Violation

if TYPE_CHECKING:
    from ficco.verifier.order import Order

Use = tuple[int, str, int]  # rank, step id, part (-1: the step itself)


@dataclass(slots=True)
class Uses:
    """The uses of one signal: its raises, waits and clears."""

    signal: Signal
    raises: list[Use] = field(default_factory=list)
    waits: list[Use] = field(default_factory=list)
    clears: list[Use] = field(default_factory=list)


WordUses = dict[Signal, Uses]


def words_of(plan: Plan) -> WordUses:
    """Collect all uses of all signals of a plan."""
    by_signal: WordUses = {}

    def of(signal: Signal) -> Uses:
        uses = by_signal.get(signal)
        if uses is None:
            uses = by_signal[signal] = Uses(signal)
        return uses

    for entry in plan.ranks:
        for step in entry.steps:
            use = (entry.rank, step.id, -1)
            for signal in step.signals:
                uses = of(signal)
                if step.kind == "raise":
                    uses.raises.append(use)
                elif step.kind == "wait":
                    uses.waits.append(use)
                else:
                    uses.clears.append(use)
            for number, part in enumerate(step.parts):
                for signal in part.waits:
                    of(signal).waits.append((entry.rank, step.id, number))
                for signal in part.raises:
                    of(signal).raises.append((entry.rank, step.id, number))
    return by_signal


def check_uses(plan: Plan, signals: WordUses) -> list[Violation]:
    """Return violations that need no order: wrong owners, missing or repeated uses."""
    violations = [violation for uses in signals.values() for violation in _owners(plan, uses)]
    mailbox = any(has_mailbox(entry.buffers) for entry in plan.ranks)
    for uses in signals.values():
        if mailbox and (uses.signal.name == "free" or uses.signal.copy):
            use = (uses.raises + uses.waits + uses.clears)[0]
            violations.append(
                _bad(use, f"{uses.signal} of a mailbox, whose copies alternate",
                     "leave it out: a call uses one copy, which is free when it starts")
            )  # fmt: skip
    if violations:
        return violations
    counts = [violation for uses in signals.values() for violation in _counts(uses)]
    return counts + _collectives(plan)


def _owners(plan: Plan, uses: Uses) -> Iterator[Violation]:
    signal, world = uses.signal, plan.problem.world
    any_use = (uses.raises + uses.waits + uses.clears)[0]
    local = signal.name == "ready"
    fits = (
        0 <= signal.rank < world
        and 0 <= signal.peer < world
        and 0 <= signal.chunk < SIGNALS[signal.name]
        and 0 <= signal.copy < 2
        and (local or signal.peer != signal.rank)
    )
    if not fits:
        yield _bad(any_use, f"{signal} is no signal of this group",
                   f"ranks are 0 to {world - 1}, chunks 0 to {SIGNALS[signal.name] - 1}, "
                   "and a rank signals itself only by `ready`")  # fmt: skip
        return
    raiser = signal.rank if local else signal.peer
    for use in uses.raises:
        if use[0] != raiser:
            yield _bad(use, f"it raises {signal}, which belongs to rank {raiser}",
                       f"let rank {raiser} raise it, or raise {signal.name}[{use[0]}]")  # fmt: skip
    for use in uses.waits + uses.clears:
        if use[0] != signal.rank:
            yield _bad(use, f"it uses {signal}, which is stored at rank {signal.rank}",
                       f"only rank {signal.rank} may wait for it and clear it")  # fmt: skip


def _counts(uses: Uses) -> Iterator[Violation]:
    signal = uses.signal
    for extra in uses.raises[1:]:
        yield _bad(extra, f"{signal} is raised a second time, first by {_name(uses.raises[0])}",
                   "raise a signal once per call")  # fmt: skip
    for extra in uses.clears[1:]:
        yield _bad(extra, f"{signal} is cleared a second time, first by {_name(uses.clears[0])}",
                   "clear a signal once per call")  # fmt: skip
    if signal.name == "free":
        if uses.clears and not uses.raises:
            yield _bad(uses.clears[0], f"{signal} is cleared and never raised again",
                       f"let rank {signal.peer} raise it after its last use of its window"
                       )  # fmt: skip
        if (uses.raises or uses.waits) and not uses.clears:
            use = (uses.raises or uses.waits)[0]
            yield _bad(use, f"{signal} is used but not cleared, though it is 1 when a call starts",
                       f"let rank {signal.rank} clear it after waiting for it")  # fmt: skip
        return
    if uses.waits and not uses.raises:
        yield _bad(uses.waits[0], f"it waits for {signal}, which nothing raises",
                   f"let rank {signal.peer} raise it")  # fmt: skip
    if uses.raises and not uses.clears:
        yield _bad(uses.raises[0], f"{signal} is raised and never cleared",
                   f"let rank {signal.rank} clear it after its last wait for it")  # fmt: skip


def _collectives(plan: Plan) -> list[Violation]:
    """Check that all ranks take part in the same collectives, in the same order."""
    per_rank = [[step for step in entry.steps if step.kind == "collective"] for entry in plan.ranks]
    for rank, steps in enumerate(per_rank):
        if [step.collective for step in steps] != [step.collective for step in per_rank[0]]:
            step = steps[0].id if steps else "-"
            return [
                Violation(rank, step, "collective", "its collectives differ from those of rank 0",
                          "let all ranks take part in the same collectives, in the same order")
            ]  # fmt: skip
    return []


def check_entries(plan: Plan, signals: WordUses) -> list[Violation]:
    """Check that every rank compares the call of every peer: it waits for the peer's `entered`.

    The wait is a step: a part of a gated step does not compare digests. Plans without windows and
    signals are exempt: they exchange data by a library's collectives only.
    """
    if not signals and not any(b.role in SHARED for entry in plan.ranks for b in entry.buffers):
        return []
    mailbox = any(has_mailbox(entry.buffers) for entry in plan.ranks)
    ranks = range(plan.problem.world)
    violations = []
    for rank in ranks:
        for peer in ranks:
            uses = signals.get(Signal(rank, "entered", peer))
            if rank == peer or (uses and any(part < 0 for _, _, part in uses.waits)):
                continue
            message = (
                f"rank {rank} has no wait step for the entry of rank {peer}, so it does not notice "
                f"if rank {peer} makes another call"
            )
            if mailbox:
                message += (
                    f", and its next call but one may store in a mailbox that rank {peer} still "
                    "reads"
                )
            step = uses.clears[0][1] if uses and uses.clears else "-"
            violations.append(
                Violation(rank, step, "entered", message, f"wait for entered[{peer}] before the "
                          "last use of its data, also if the data imply that it has entered")
            )  # fmt: skip
    return violations


def check_words(order: Order, signals: WordUses) -> list[Violation]:
    """Return violations of the order of each signal's raise, waits and clear."""
    return [violation for uses in signals.values() for violation in _ordered(order, uses)]


def _ordered(order: Order, uses: Uses) -> Iterator[Violation]:
    signal = uses.signal
    if not uses.clears:
        return
    clear = order.at(*uses.clears[0])
    waits = [order.at(*use) for use in uses.waits]
    arrives = any(order.hb(wait, clear) for wait in waits)
    for use, wait in zip(uses.waits, waits, strict=True):
        again = signal.name == "free" and order.is_behind_clear(wait, uses)
        if not again and not order.hb(wait, clear):
            yield _bad(use, f"its wait for {signal} may come after the signal is cleared by "
                       f"{_name(uses.clears[0])}", "clear it after the last wait")  # fmt: skip
    for use in uses.raises:
        raised = order.at(*use)
        if signal.name == "free":
            if not order.hb(clear, raised):
                yield _bad(use, f"it may raise {signal} before rank {signal.rank} has cleared the "
                           "previous raise", f"first wait for entered[{signal.rank}], raised after "
                           "the clear")  # fmt: skip
            continue
        if not uses.waits and not order.hb(order.raised(*use), clear):
            yield _bad(uses.clears[0], f"it may clear {signal} before it is raised by "
                       f"{_name(use)}", "wait for the signal before clearing it")  # fmt: skip
        if not order.hb(order.before[signal.rank, signal.copy], raised):
            yield _bad(use, f"it may raise {signal} while rank {signal.rank} is still in its "
                       "previous call", f"wait for free[{signal.rank}] first")  # fmt: skip
    if signal.name == "free" and not arrives:  # other signals do not imply its arrival
        yield _bad(uses.clears[0], f"it may clear {signal} before it has arrived",
                   "wait for the signal before clearing it")  # fmt: skip


def _bad(use: Use, message: str, mend: str) -> Violation:
    return Violation(use[0], _label(use), "signals", message, mend)


def _label(use: Use) -> str:
    return use[1] if use[2] < 0 else f"{use[1]}[{use[2]}]"


def _name(use: Use) -> str:
    return f"{_label(use)} of rank {use[0]}"
