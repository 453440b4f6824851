"""What signals cost the host engine's lanes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ficco.plan import Signal, Step
from ficco.profiling.host.rig import Rig, lasted
from ficco.timeline import Span

__all__ = ["measure"]

_WORDS, _ROUNDS = 200, 100
_LANE = "signals"


def measure(rig: Rig) -> dict[str, float]:
    """Return signal_us, raise_us, wait_us and clear_us of a profile's costs.

    A signal of many in a step, all ranks that have a core at once, the median rank of the fastest
    run; `raise_us` is half of what it takes a signal to go from rank 0 to rank 1 and another one
    back, without what raising and awaiting take. A single rank has no signals.
    """
    if rig.world == 1:
        return dict.fromkeys(("signal_us", "raise_us", "wait_us", "clear_us"), 0.0)
    runs = rig.spans(lambda rank: _steps(rig.active, rank) if rank < rig.active else [])
    names = {"signal_us": "raise", "wait_us": "wait", "clear_us": "clear"}
    found = {field: _each(runs, {name}) / _WORDS for field, name in names.items()}
    rounds = {f"{kind}{i}" for kind in ("send", "wait") for i in range(_ROUNDS)}
    half = _each(rig.spans(_to_and_fro), rounds) / (2 * _ROUNDS)
    found["raise_us"] = max(0.0, half - found["signal_us"] - found["wait_us"])
    return found


def _steps(world: int, rank: int) -> list[Step]:
    """Return steps that raise signals of the next rank, and await the own ones until they are up.

    Then they are awaited once more, which is what is timed, and cleared.
    """
    theirs, mine = (rank + 1) % world, (rank - 1) % world
    raised = tuple(Signal(theirs, "data", rank, i) for i in range(_WORDS))
    awaited = tuple(Signal(rank, "data", mine, i) for i in range(_WORDS))
    kinds = {"raise": "raise", "first": "wait", "wait": "wait", "clear": "clear"}
    return [
        Step(name, _LANE, kind, "none", signals=raised if kind == "raise" else awaited)
        for name, kind in kinds.items()
    ]


def _to_and_fro(rank: int) -> list[Step]:
    if rank > 1:
        return []
    steps = []
    for i in range(_ROUNDS):
        send = Step(
            f"send{i}", _LANE, "raise", "none", signals=(Signal(1 - rank, "data", rank, i),)
        )
        wait = Step(f"wait{i}", _LANE, "wait", "none", signals=(Signal(rank, "data", 1 - rank, i),))
        steps += [send, wait] if rank == 0 else [wait, send]
    back = tuple(Signal(rank, "data", 1 - rank, i) for i in range(_ROUNDS))
    return [*steps, Step("clear", _LANE, "clear", "none", signals=back)]


def _each(runs: Sequence[Sequence[Span]], steps: set[str]) -> float:
    """Return how long steps last together, of the median rank in the fastest run."""
    return min(
        statistics.median(lasted(span for span in spans if span.step in steps)) for spans in runs
    )
