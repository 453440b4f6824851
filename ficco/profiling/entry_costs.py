"""What a call makes the host submit, counted in its plan, and what each of it costs."""

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
    """What one rank's call submits.

    Attributes:
        launches: calls of a library.
        kernels: of ficco's own.
        copies: pushes, copies within the device, and signals where these are copies.
        signals: steps that raise, await or clear signals.
    """

    launches: int
    kernels: int
    copies: int
    signals: int


def tally(plan: RankPlan, signal_kind: str = "write") -> Tally:
    """Count what a plan makes the host submit, with a kind of signals."""
    within = steps_within(plan)  # what a kernel does by itself is not submitted
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
    """Return what a call and what it submits cost the host, from calls that were timed.

    Calls without a library's launches are made by native code as a whole: they cost what a call of
    one kernel does, and what more they submit. See `Costs.host_native_us`.

    Args:
        tallies: of each call.
        us: what each call took the host.
        launch_us: what a launch costs at least.
        direct_us: what a call of one kernel of ficco's own costs, checks and all.
    """
    rows, rest = [], []
    for took, each in zip(us, tallies, strict=True):
        native = not each.launches
        submitted = (each.launches, each.kernels - native, each.copies, each.signals)
        rows.append((0.0 if native else 1.0, *submitted))
        rest.append(took - (direct_us if native else each.launches * launch_us))
    (call, more, kernel, copy, signals), _ = least_squares(rows, rest)
    return {
        "host_call_us": call,
        "host_launch_us": launch_us + more,
        "host_kernel_us": kernel,
        "host_copy_us": copy,
        "host_words_us": signals,
    }
