"""What words cost streams: raising one at a peer, clearing one, a wait that holds, and the way."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ficco.profiling.gpu import driver
from ficco.profiling.gpu.driver import WordCommand
from ficco.profiling.gpu.landing import Landing
from ficco.profiling.gpu.ranks import Ranks

__all__ = ["measure"]

_BATCHES, _WORDS, _ROUNDS = 5, 200, 100
# Words of every rank's buffer: those that peers raise, those that hold, those that are cleared, and
# the one of the rounds; a page each.
_RAISED, _HOLDING, _CLEARED, _BALL = (4096 * page for page in range(4))


def measure(ranks: Ranks, landing: Landing) -> dict[str, float]:
    """Return signal_us, clear_us, wait_us and raise_us of a profile's costs.

    A word of many in a batch, all ranks at once, the slowest; `raise_us` is half of what it takes a
    word to go to the other rank and another one back, without what writing and awaiting take.
    """
    own, there = landing.bases[ranks.rank], landing.bases[(ranks.rank + 1) % ranks.world]
    landing.memory[: 4096 * 4].zero_()
    landing.memory[_HOLDING : _HOLDING + 4 * _WORDS].view(torch.int32).fill_(1)
    ranks.meet()
    count = _BATCHES * _WORDS
    signal = ranks.slowest(ranks.timed(_batches(False, there + _RAISED), count))
    clear = ranks.slowest(ranks.timed(_batches(False, own + _CLEARED), count))
    wait = ranks.slowest(ranks.timed(_batches(True, own + _HOLDING), count))
    to_and_fro = ranks.timed(_rounds(ranks, landing), _ROUNDS)
    half = max(ranks.gather(to_and_fro)[:2]) / 2
    ranks.meet()
    return {
        "signal_us": signal,
        "raise_us": max(0.0, half - signal - wait),
        "wait_us": wait,
        "clear_us": clear,
    }


def _batches(waits: bool, first: int) -> Callable[[], None]:
    commands = [WordCommand(waits, first + 4 * i, 1) for i in range(_WORDS)]

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for _ in range(_BATCHES):
            driver.words(commands, stream)

    return run


def _rounds(ranks: Ranks, landing: Landing) -> Callable[[], None] | None:
    """Return rounds of a word from rank 0 to rank 1 and one back; the others only look on.

    The number of the round is what is raised, so nothing has to be cleared in between.
    """
    if ranks.rank > 1:
        return None
    own, there = landing.bases[ranks.rank] + _BALL, landing.bases[1 - ranks.rank] + _BALL

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for number in range(1, _ROUNDS + 1):
            send, await_ = WordCommand(False, there, number), WordCommand(True, own, number)
            driver.words([send, await_] if ranks.rank == 0 else [await_, send], stream)

    return run
