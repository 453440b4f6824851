"""Comparing a plan with what a kernel does, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from ficco.errors import PlanError
from ficco.plan import RankPlan, Step

__all__ = ["check_same_steps", "refuse"]


def check_same_steps(
    plan: RankPlan, steps: Sequence[Step], wanted: Sequence[Step], plans: str
) -> None:
    """Check that steps of a plan, except for their ids, are what a kernel does.

    Args:
        plan: of one rank.
        steps: the plan's steps that the kernel has to do.
        wanted: what the kernel does.
        plans: the plans that the kernel runs, for messages.

    Raises:
        PlanError: they differ; the message names the first step that does.
    """
    for step, expected in zip(steps, wanted, strict=False):
        if _content(step) != _content(expected):
            refuse(plan, step, f"the kernel does {_words(expected)} here", plans)
    if len(steps) != len(wanted):
        why = f"the plan has {len(steps)} steps, the kernel {len(wanted)}"
        refuse(plan, plan.steps[-1], why, plans)


def refuse(plan: RankPlan, step: Step, why: str, plans: str) -> NoReturn:
    """Raise a PlanError that names a step which the kernel cannot run."""
    raise PlanError(
        f"rank {plan.rank}, step {step.id!r}: {why}; the kernel runs only plans of {plans} on "
        "several ranks"
    )


def _content(step: Step) -> tuple[Any, ...]:
    """Return what a step does, without its name."""
    return step._replace(id="", signals=(), products=()), frozenset(step.signals)


def _words(step: Step) -> str:
    signals = f" of {_listed(step.signals)}" if step.signals else ""
    boxes = f" from {_listed(step.reads)} to {_listed(step.writes)}" if step.writes else ""
    return f"a {step.kind}{signals}{boxes}"


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "nothing"
