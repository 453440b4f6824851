"""The costs of words on streams: raise at a peer, clear, a satisfied wait, and the latency."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ficco.profiling.gpu import driver
from ficco.profiling.gpu.driver import WordCommand
from ficco.profiling.gpu.ranks import Ranks
from ficco.profiling.gpu.recv_buffer import RecvBuffer

__all__ = ["measure"]

_BATCHES, _WORDS, _ROUNDS = 5, 200, 100
# Words of every rank's buffer, one page each: raised by peers, already set, to clear, the word of
# the rounds, and the numbers 1, 2, ...
_RAISED, _HOLDING, _CLEARED, _BALL, _NUMBERS = (4096 * page for page in range(5))


def measure(ranks: Ranks, recv: RecvBuffer) -> dict[str, float]:
    """Return signal_us, clear_us, wait_us and raise_us of a profile's costs.

    Each is the cost of one of many words in a batch, on the slowest rank, while all ranks run.
    `raise_us` is half of the round trip of a word between two ranks, without the costs of writing
    and waiting.
    """
    copied = driver.kind_of_signals() == "copy"
    base, peer_base = recv.bases[ranks.rank], recv.bases[(ranks.rank + 1) % ranks.world]
    recv.memory[: 4096 * 5].zero_()
    recv.memory[_HOLDING : _HOLDING + 4 * _WORDS].view(torch.int32).fill_(1)
    numbers = torch.arange(1, _ROUNDS + 1, dtype=torch.int32, device=recv.memory.device)
    recv.memory[_NUMBERS : _NUMBERS + 4 * _ROUNDS].view(torch.int32).copy_(numbers)
    ranks.meet()
    count = _BATCHES * _WORDS
    signals = (
        _copies(peer_base + _RAISED, base + _NUMBERS)
        if copied
        else _batches(False, peer_base + _RAISED)
    )
    signal = ranks.slowest(ranks.timed(signals, count))
    clear = ranks.slowest(ranks.timed(_batches(False, base + _CLEARED), count))
    wait = ranks.slowest(ranks.timed(_batches(True, base + _HOLDING), count))
    round_trip = ranks.timed(_rounds(ranks, recv, copied), _ROUNDS)
    half = max(ranks.gather(round_trip)[:2]) / 2
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
    """Return round trips of a word between rank 0 and rank 1; other ranks run nothing.

    Each round raises its own number, so no word has to be cleared in between.
    """
    if ranks.rank > 1:
        return None
    own_word, peer_word = recv.bases[ranks.rank] + _BALL, recv.bases[1 - ranks.rank] + _BALL
    numbers = recv.bases[ranks.rank] + _NUMBERS

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for number in range(1, _ROUNDS + 1):
            send, wait = WordCommand(False, peer_word, number), WordCommand(True, own_word, number)
            if not copied:
                driver.words([send, wait] if ranks.rank == 0 else [wait, send], stream)
                continue
            if ranks.rank == 1:
                driver.words([wait], stream)
            driver.copy(peer_word, numbers + 4 * (number - 1), 4, stream)
            if ranks.rank == 0:
                driver.words([wait], stream)

    return run
