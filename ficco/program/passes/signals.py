"""The ways in which a target stores signals, and waits for them.

On the caller's stream one kernel stores the signals of an entry if they are many, or if the stream
may not write to one of them. On other lanes such a kernel would need room on the device, which a
kernel that waits for these signals may occupy. There the stream writes, and where it may not, a
4-byte copy stores each signal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ficco.plan import RankPlan, Signal, Step
from ficco.program import SignalWrite, Wait
from ficco.program.target import MOST_STORED, Target


def stored(
    name: str,
    lane: str,
    after: tuple[str, ...],
    clears: tuple[Signal, ...],
    raises: tuple[Signal, ...],
    *,
    inline: bool,
    target: Target,
) -> list[SignalWrite]:
    """Return the entries that clear and then raise signals, in the ways that a target has.

    Args:
        name: id of the entry; several entries have it with a number.
        lane: of the entries.
        after: of the first entry.
        clears: signals that become 0.
        raises: signals that are raised behind them.
        inline: whether the lane is the caller's stream.
        target: of the program.
    """
    if target.threads:
        return [SignalWrite(name, lane, after, clears, raises, "thread")]
    if inline and _by_kernel((*clears, *raises), target):
        pieces = [(*piece, "kernel") for piece in _batches(clears, raises)]
    elif not target.writable:
        return [SignalWrite(name, lane, after, clears, raises, "stream")]
    elif not all(target.writes_to(signal.rank) for signal in clears):
        return [SignalWrite(name, lane, after, clears, raises, "copy")]
    else:
        written = tuple([signal for signal in raises if target.writes_to(signal.rank)])
        copied = tuple([signal for signal in raises if not target.writes_to(signal.rank)])
        pieces = [(clears, written, "stream")] if clears or written else []
        pieces += [((), copied, "copy")] if copied else []
    if len(pieces) == 1:
        return [SignalWrite(name, lane, after, *pieces[0])]
    return [
        SignalWrite(f"{name}[{i}]", lane, () if i else after, *piece)
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


def waited(
    name: str, lane: str, after: tuple[str, ...], signals: tuple[Signal, ...], how: str
) -> list[Wait]:
    """Return the entries that wait for signals; a kernel waits for MOST_STORED signals at most.

    Args:
        name: id of the entry; several entries have it with a number.
        lane: of the entries.
        after: of the first entry.
        signals: all that must arrive.
        how: of `Wait`.
    """
    if how != "kernel" or len(signals) <= MOST_STORED:
        return [Wait(name, lane, after, signals, how)]
    return [
        Wait(f"{name}[{i}]", lane, () if i else after, signals[begin : begin + MOST_STORED], how)
        for i, begin in enumerate(range(0, len(signals), MOST_STORED))
    ]
