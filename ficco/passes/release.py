"""The release of a window by the last launch of a gated step, in place of two further entries."""

from __future__ import annotations

from ficco.plan import RankPlan, Step, signal_place
from ficco.program import Gated
from ficco.tables import WindowRelease

__all__ = ["ends_of", "with_release"]

Ends = tuple[Step, Step]  # the `clear` and the `raise`


def ends_of(plan: RankPlan) -> dict[str, Ends]:
    """Return the `clear` and `raise` steps that release the window behind a gated step.

    The two steps directly follow the gated step in its lane and have no `after`, and the parts of
    the gated step wait for the rows that they multiply.
    """
    if not any(step.parts for step in plan.steps):
        return {}
    roles = {buffer.name: buffer.role for buffer in plan.buffers}
    lanes: dict[str, list[Step]] = {}
    for step in plan.steps:
        lanes.setdefault(step.lane, []).append(step)
    ends = {}
    for steps in lanes.values():
        for step, clear, leave in zip(steps, steps[1:], steps[2:], strict=False):
            reads = [p.a.buffer for part in step.parts if part.waits for p in part.products]
            if (
                any(roles[name] == "window" for name in reads)
                and (clear.kind, leave.kind) == ("clear", "raise")
                and not (clear.after or leave.after)
            ):
                ends[step.id] = clear, leave
    return ends


def with_release(launch: Gated, ends: Ends) -> Gated | None:
    """Return a launch that also releases the window when it ends; None if it cannot."""
    if not any(part.source == "window" and part.rows and part.cols for part in launch.parts):
        return None  # the kernel has no program that waits for the window
    clear, leave = ends
    cleared = tuple([signal_place(signal) for signal in clear.signals])
    peers = tuple([signal.rank for signal in leave.signals])
    (raised,) = {signal_place(signal) for signal in leave.signals}
    return launch._replace(release=WindowRelease(cleared, raised, peers))
