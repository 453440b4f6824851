"""The host's submissions for a call, counted in its plan, and the cost of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ficco.engines.gating import launches_of, steps_within
from ficco.engines.rows import encode
from ficco.engines.work import calls_of, sum_of
from ficco.grouping import joined_copies, stores_of
from ficco.plan import RankPlan
from ficco.profiling.figures import least_squares

__all__ = ["Tally", "submission_costs", "tally"]


class Tally(NamedTuple):
    """The submissions of one rank's call.

    Attributes:
        launches: library calls.
        kernels: ficco's own kernels.
        copies: pushes, copies within the device, and signals if these are copies.
        signals: steps that raise, wait for or clear signals.
    """

    launches: int
    kernels: int
    copies: int
    signals: int


def tally(plan: RankPlan, signal_kind: str = "write") -> Tally:
    """Count the host's submissions for a plan, with a kind of signals."""
    within = steps_within(plan)  # the host does not submit steps within a kernel
    works = encode(plan, {}, one_launch=True, within=within).works
    stored = stores_of(plan, within, signal_kind)
    copied = [
        step
        for step in plan.steps
        if (signal_kind, step.kind) == ("copy", "raise") and step.id not in {*stored, *within}
    ]
    kinds = [s.kind for s in plan.steps if s.id not in within and s not in copied]
    launches = kernels = 0
    for work in works:
        if work.step.parts:
            kernels += len(launches_of(plan, work.step))
        elif work.step.kind == "reduce" and sum_of(work.step.reads, work.step.writes[0]):
            kernels += 1
        else:
            launches += len(calls_of(plan, work))
    return Tally(
        launches,
        kernels,
        sum(len(step.writes) for step in plan.steps if step.kind == "copy")
        + sum(
            len(joined_copies(step.reads, step.writes))
            for step in plan.steps
            if step.kind == "local_copy"
        )
        + sum(len(step.signals) for step in copied),
        sum(kinds.count(kind) for kind in ("raise", "wait", "clear")),
    )


def submission_costs(
    tallies: Sequence[Tally], us: Sequence[float], launch_us: float, direct_us: float
) -> dict[str, float]:
    """Return the host's costs of a call and of each submission, from timed calls.

    Native code makes calls without library launches as a whole: these cost as much as a call of one
    kernel, plus their further submissions. See `Costs.host_native_us`.

    Args:
        tallies: the submissions of each call.
        us: the host's time of each call.
        launch_us: the least cost of a launch.
        direct_us: the cost of a call of one of ficco's kernels, including checks.
    """
    rows, remaining_us = [], []
    for call_us, counts in zip(us, tallies, strict=True):
        native = not counts.launches
        submitted = (counts.launches, counts.kernels - native, counts.copies, counts.signals)
        rows.append((0.0 if native else 1.0, *submitted))
        remaining_us.append(call_us - (direct_us if native else counts.launches * launch_us))
    (call, extra_launch, kernel, copy, signals), _ = least_squares(rows, remaining_us)
    return {
        "host_call_us": call,
        "host_launch_us": launch_us + extra_launch,
        "host_kernel_us": kernel,
        "host_copy_us": copy,
        "host_words_us": signals,
    }
