"""Blocking: progress if lanes share a hardware queue.

Submission rule: if every rank runs its steps strictly in submission order, no wait lasts forever.
"""

from __future__ import annotations

from collections.abc import Iterator

from ficco.plan import Plan, Signal, Step
from ficco.verifier.form import Violation
from ficco.verifier.signals import WordUses


def check_submission(plan: Plan, signals: WordUses) -> list[Violation]:
    """Run all ranks' steps in submission order; return the steps at which ranks are stuck.

    Signals are raised once per call, so the outcome does not depend on the order of the simulation.
    `free` is there when a call starts; a wait behind its clear is for the one of this call.
    Plans with a step marked `concurrent` are exempt: they are not chosen if queues are shared.
    """
    if any(step.concurrent for entry in plan.ranks for step in entry.steps):
        return []
    raised = {signal for signal in signals if signal.name == "free"}
    entered = [0] * plan.problem.world  # collectives that each rank has entered
    passed = [0] * plan.problem.world  # collectives that each rank has left
    at = [0] * plan.problem.world
    moved = True
    while moved:
        moved = False
        for rank, entry in enumerate(plan.ranks):
            while at[rank] < len(entry.steps):
                step = entry.steps[at[rank]]
                if step.kind == "collective":
                    entered[rank] = passed[rank] + 1
                    if min(entered) < entered[rank]:
                        break  # the last rank to enter passes, and the loop revisits the others
                    passed[rank] += 1
                if any(signal not in raised for signal in _awaited(step)):
                    break
                if step.kind == "clear":
                    raised.difference_update(s for s in step.signals if s.name == "free")
                raised.update(_raised(step))
                at[rank] += 1
                moved = True
    return [
        Violation(
            rank, entry.steps[at[rank]].id, "submission",
            "run in submission order, as on a shared hardware queue, it waits for "
            + (
                ", ".join(str(w) for w in _awaited(entry.steps[at[rank]]) if w not in raised)
                or "other ranks to enter the collective"
            )
            + " for ever",
            "on every rank, submit the raise of a signal before its wait",
        )
        for rank, entry in enumerate(plan.ranks)
        if at[rank] < len(entry.steps)
    ]  # fmt: skip


def _awaited(step: Step) -> Iterator[Signal]:
    if step.kind == "wait":
        yield from step.signals
    for part in step.parts:
        yield from part.waits


def _raised(step: Step) -> Iterator[Signal]:
    if step.kind == "raise":
        yield from step.signals
    for part in step.parts:
        yield from part.raises
