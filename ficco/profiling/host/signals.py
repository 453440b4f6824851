"""The costs of signals on the host engine's lanes."""

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

    Each is the cost of one of many signals in a step, on the median rank of the fastest run, while
    all active ranks run. `raise_us` is half of the round trip of a signal between rank 0 and rank
    1, without the costs of raising and waiting. A single rank has no signals.
    """
    if rig.world == 1:
        return dict.fromkeys(("signal_us", "raise_us", "wait_us", "clear_us"), 0.0)
    runs = rig.spans(lambda rank: _steps(rig.active, rank) if rank < rig.active else [])
    names = {"signal_us": "raise", "wait_us": "wait", "clear_us": "clear"}
    costs = {field: _each(runs, {name}) / _WORDS for field, name in names.items()}
    rounds = {f"{kind}{i}" for kind in ("send", "wait") for i in range(_ROUNDS)}
    half = _each(rig.spans(_to_and_fro), rounds) / (2 * _ROUNDS)
    costs["raise_us"] = max(0.0, half - costs["signal_us"] - costs["wait_us"])
    return costs


def _steps(world: int, rank: int) -> list[Step]:
    """Return steps that raise the next rank's signals and wait until this rank's are raised.

    A second wait on the raised signals is timed; then they are cleared.
    """
    next_rank, previous_rank = (rank + 1) % world, (rank - 1) % world
    raised = tuple(Signal(next_rank, "data", rank, i) for i in range(_WORDS))
    awaited = tuple(Signal(rank, "data", previous_rank, i) for i in range(_WORDS))
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
    """Return the total time of steps, on the median rank in the fastest run."""
    return min(
        statistics.median(lasted(span for span in spans if span.step in steps)) for spans in runs
    )
