"""Steps that raise or clear signals as entries, by the way in which a target stores them.

On the caller's stream one kernel stores the signals of an entry if they are many, or if the stream
may not write to one of them. On other lanes such a kernel would need room on the device, which a
kernel that waits for these signals may occupy. There the stream writes, and where it may not, a
4-byte copy stores each signal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ficco.plan import RankPlan, Signal, Step
from ficco.program import SignalWrite
from ficco.target import MOST_STORED, Target

__all__ = ["joined_raises", "writes_of"]


def writes_of(
    step: Step, after: tuple[str, ...], raises: Sequence[Signal], inline: bool, target: Target
) -> list[SignalWrite]:
    """Return the entries of a step that raises or clears signals.

    Args:
        step: a `raise` or `clear`.
        after: of its first entry.
        raises: further signals to raise behind a `clear`; see `joined_raises`.
        inline: whether its lane is the caller's stream.
        target: of the program.
    """
    clears: tuple[Signal, ...] = ()
    if step.kind == "clear":
        clears = step.signals
    raised = tuple(raises) if clears else step.signals
    if target.threads:
        return [SignalWrite(step.id, step.lane, after, clears, raised, "thread")]
    if not inline and not target.writable:
        return [SignalWrite(step.id, step.lane, after, clears, raised, "stream")]
    if inline and _by_kernel((*clears, *raised), target):
        pieces = [(*piece, "kernel") for piece in _batches(clears, raised)]
    else:
        written = tuple([signal for signal in raised if target.writes_to(signal.rank)])
        copied = tuple([signal for signal in raised if not target.writes_to(signal.rank)])
        pieces = [(clears, written, "stream")] if clears or written else []
        pieces += [((), copied, "copy")] if copied else []
    if len(pieces) == 1:
        return [SignalWrite(step.id, step.lane, after, *pieces[0])]
    return [
        SignalWrite(f"{step.id}[{i}]", step.lane, () if i else after, *piece)
        for i, piece in enumerate(pieces)
    ]


def joined_raises(plan: RankPlan, inline: set[str], target: Target) -> dict[str, Step]:
    """Return the `raise` steps that the kernel of a `clear` stores, too, by the id of the `clear`.

    Such a `raise` directly follows the `clear` in its lane and has no `after`.

    Args:
        plan: of one rank.
        inline: the lanes on the caller's stream.
        target: of the program.
    """
    joined: dict[str, Step] = {}
    if not target.store_from:
        return joined
    before: dict[str, Step] = {}
    for step in plan.steps:
        if step.lane not in inline:
            continue
        last = before.get(step.lane)
        if (
            (step.kind == "raise" and not step.after)
            and (last is not None and last.kind == "clear")
            and _by_kernel((*last.signals, *step.signals), target)
        ):
            joined[last.id] = step
        before[step.lane] = step
    return joined


def _by_kernel(signals: Sequence[Signal], target: Target) -> bool:
    """Return whether one kernel stores signals on the caller's stream."""
    if not target.store_from:
        return False
    return len(signals) >= target.store_from or not all(
        target.writes_to(signal.rank) for signal in signals
    )


def _batches(
    clears: Sequence[Signal], raises: Sequence[Signal]
) -> Iterator[tuple[tuple[Signal, ...], tuple[Signal, ...]]]:
    """Yield clears and raises of each kernel: zeros come before other values."""
    number = len(clears)
    every = (*clears, *raises)
    for begin in range(0, len(every), MOST_STORED):
        past = begin + MOST_STORED
        yield every[begin : min(past, number)], every[max(begin, number) : past]
