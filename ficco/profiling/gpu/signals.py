"""What words cost streams: raising one at a peer, clearing one, a wait that holds, and the way."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ficco.profiling.gpu import driver
from ficco.profiling.gpu.driver import WordCommand
from ficco.profiling.gpu.ranks import Ranks
from ficco.profiling.gpu.recv_buffer import RecvBuffer

__all__ = ["measure"]

_BATCHES, _WORDS, _ROUNDS = 5, 200, 100
# Words of every rank's buffer: those that peers raise, those that hold, those that are cleared, and
# the one of the rounds, and the numbers 1, 2, ...; a page each.
_RAISED, _HOLDING, _CLEARED, _BALL, _NUMBERS = (4096 * page for page in range(5))


def measure(ranks: Ranks, recv: RecvBuffer) -> dict[str, float]:
    """Return signal_us, clear_us, wait_us and raise_us of a profile's costs.

    A word of many in a batch, all ranks at once, the slowest; `raise_us` is half of what it takes a
    word to go to the other rank and another one back, without what writing and awaiting take.
    """
    copied = driver.kind_of_signals() == "copy"
    own, there = recv.bases[ranks.rank], recv.bases[(ranks.rank + 1) % ranks.world]
    recv.memory[: 4096 * 5].zero_()
    recv.memory[_HOLDING : _HOLDING + 4 * _WORDS].view(torch.int32).fill_(1)
    numbers = torch.arange(1, _ROUNDS + 1, dtype=torch.int32, device=recv.memory.device)
    recv.memory[_NUMBERS : _NUMBERS + 4 * _ROUNDS].view(torch.int32).copy_(numbers)
    ranks.meet()
    count = _BATCHES * _WORDS
    signals = (
        _copies(there + _RAISED, own + _NUMBERS) if copied else _batches(False, there + _RAISED)
    )
    signal = ranks.slowest(ranks.timed(signals, count))
    clear = ranks.slowest(ranks.timed(_batches(False, own + _CLEARED), count))
    wait = ranks.slowest(ranks.timed(_batches(True, own + _HOLDING), count))
    to_and_fro = ranks.timed(_rounds(ranks, recv, copied), _ROUNDS)
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


def _copies(first: int, one: int) -> Callable[[], None]:
    """Return signals that are copies of a word that holds 1."""

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for _ in range(_BATCHES):
            for i in range(_WORDS):
                driver.copy(first + 4 * i, one, 4, stream)

    return run


def _rounds(ranks: Ranks, recv: RecvBuffer, copied: bool) -> Callable[[], None] | None:
    """Return rounds of a word from rank 0 to rank 1 and one back; the others only look on.

    The number of the round is what is raised, so nothing has to be cleared in between.
    """
    if ranks.rank > 1:
        return None
    own, there = recv.bases[ranks.rank] + _BALL, recv.bases[1 - ranks.rank] + _BALL
    numbers = recv.bases[ranks.rank] + _NUMBERS

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for number in range(1, _ROUNDS + 1):
            send, await_ = WordCommand(False, there, number), WordCommand(True, own, number)
            if not copied:
                driver.words([send, await_] if ranks.rank == 0 else [await_, send], stream)
                continue
            if ranks.rank == 1:
                driver.words([await_], stream)
            driver.copy(there, numbers + 4 * (number - 1), 4, stream)
            if ranks.rank == 0:
                driver.words([await_], stream)

    return run
