"""Transfers between GPUs: rates of copy engines, costs of signals, times of collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ficco.core.machine import COLLECTIVES
from ficco.measure.profiling.figures import Points, gbps, latency_and_rates, links_per, net_rates
from ficco.measure.profiling.gpu import driver
from ficco.measure.profiling.gpu.driver import WordCommand
from ficco.measure.profiling.gpu.ranks import MIB, Enqueue, Ranks, RecvBuffer, new_stream
from ficco.runtime import distributed

_SIZES = tuple(4096 << shift for shift in (0, 4, 6, 8, 10, 12, 14, 16))  # 4 KiB .. 256 MiB
_LARGEST = _SIZES[-1]
_TURNED = tuple(65536 << shift for shift in (0, 2, 4, 6, 8, 10))  # 64 KiB .. 64 MiB
_LEAST_US = 0.01  # curves must not contain zeros
_OUT_BYTES, _IN_BYTES, _BOX_BYTES = 32 * MIB, 64 * MIB, 16 * MIB
_ROW_BYTES = tuple(256 << i for i in range(7))  # 256 B .. 16 KiB
_PITCHES = 8  # ratio of the pitch to the width of a box's rows
_COPIES, _MOST_COPIES, _MOST_BYTES = 4, 64, 1 << 30
_LANE_COPIES = 16  # consecutive copies; so many that the fixed costs of a run are negligible


def link(ranks: Ranks, recv: RecvBuffer) -> dict[str, Any]:
    """Return a profile's link within a node, on the slowest rank, while all ranks send.

    The rates exclude the latency of a copy, which is a separate field of a profile.
    """
    source = torch.zeros(_LARGEST, dtype=torch.uint8, device=ranks.device)
    alone = _by_size(ranks, recv, source)
    latency, rates = latency_and_rates(alone)
    out = _to_several(ranks, recv, source, latency)
    rows = [(width, _BOX_BYTES, us) for width, us in _by_row(ranks, recv, source)]
    return {
        "scope": "node",
        "per": links_per(out),
        "latency_us": latency,
        "gbps": rates,
        "out_gbps": out,
        "in_gbps": _from_several(ranks, recv, source, latency),
        "row_gbps": net_rates(rows, latency),
        **_turning(ranks, recv, source, dict(alone)),
    }


def _copying(places: Callable[[int], tuple[int, int]], size: int) -> Enqueue:
    """Return copies on the current stream; `places` returns a copy's target and source."""

    def copy(number: int) -> None:
        driver.copy(*places(number), size, torch.cuda.current_stream().cuda_stream)

    return copy


def _by_size(ranks: Ranks, recv: RecvBuffer, source: torch.Tensor) -> Points:
    """Return (bytes, us of one copy): each rank sends consecutive copies to the next rank."""
    target, source_base = recv.bases[(ranks.rank + 1) % ranks.world], source.data_ptr()
    points = []
    for size in _SIZES:
        count = max(_COPIES, min(_MOST_COPIES, _MOST_BYTES // size))

        def places(i: int, size: int = size) -> tuple[int, int]:
            offset = i * size % _LARGEST
            return target + offset, source_base + offset

        points.append((size, ranks.slowest(ranks.timed(_copying(places, size), count))))
    return points


def _turning(
    ranks: Ranks, recv: RecvBuffer, source: torch.Tensor, alone: dict[int, float]
) -> dict[str, Points]:
    """Return (bytes, extra us of a copy) when every copy goes to a different peer than the last.

    All ranks repeatedly push to rank+1, rank+2, ... in turn, without synchronization. With two
    ranks there is only one peer.
    """
    if ranks.world < 3:
        return {}
    places = [base + ranks.rank * _TURNED[-1] for base in ranks.rotated(recv.bases)]
    source_base, points = source.data_ptr(), []
    for size in _TURNED:
        rounds = max(2, min(_MOST_COPIES, _MOST_BYTES // size) // len(places))

        def turn(i: int, size: int = size) -> tuple[int, int]:
            offset = i // len(places) * size % _TURNED[-1]
            return places[i % len(places)], source_base + offset

        us = ranks.slowest(ranks.timed(_copying(turn, size), rounds * len(places)))
        points.append((size, max(_LEAST_US, us - alone[size])))
    return {"turn_us": points}


def _to_several(ranks: Ranks, recv: RecvBuffer, source: torch.Tensor, latency_us: float) -> Points:
    """Return (peers, total GB/s): each rank sends to `peers` peers, with one stream per peer."""
    streams = [new_stream() for _ in range(ranks.world - 1)]
    places = [base + ranks.rank * _OUT_BYTES for base in ranks.rotated(recv.bases)]
    points = []
    for peers in range(1, ranks.world):

        def run(_: int, peers: int = peers) -> None:
            main = torch.cuda.current_stream()
            for lane, stream in enumerate(streams[:peers]):
                stream.wait_stream(main)
                source_address = source.data_ptr() + lane % _COPIES * _OUT_BYTES
                for _ in range(_LANE_COPIES):
                    driver.copy(places[lane], source_address, _OUT_BYTES, stream.cuda_stream)
            for stream in streams[:peers]:
                main.wait_stream(stream)

        us = ranks.slowest(ranks.timed(run) / _LANE_COPIES) - latency_us
        points.append((peers, gbps(peers * _OUT_BYTES, us)))
    return points


def _from_several(
    ranks: Ranks, recv: RecvBuffer, source: torch.Tensor, latency_us: float
) -> Points:
    """Return (peers, total GB/s): `peers` ranks send to rank 0 at once."""
    target = recv.bases[0] + ranks.rank * _IN_BYTES
    copy = _copying(lambda _: (target, source.data_ptr()), _IN_BYTES)
    points = []
    for peers in range(1, ranks.world):
        sends = copy if 1 <= ranks.rank <= peers else None
        rank_us = ranks.timed(sends, _LANE_COPIES)
        us = ranks.slowest(rank_us if sends else 0.0) - latency_us
        points.append((peers, gbps(peers * _IN_BYTES, us)))
    return points


def _by_row(ranks: Ranks, recv: RecvBuffer, source: torch.Tensor) -> Points:
    """Return (bytes of a row, us of a box): copy parts of wider rows to packed rows."""
    target, source_base = recv.bases[(ranks.rank + 1) % ranks.world], source.data_ptr()
    points = []
    for width in _ROW_BYTES:

        def copy(turn: int, width: int = width) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            address, box = source_base + turn * width, (_BOX_BYTES // width, width)
            driver.copy_rows(target, width, address, _PITCHES * width, box, stream)

        points.append((width, ranks.slowest(ranks.timed(copy, _LANE_COPIES))))
    return points


# ---- signals

_BATCHES, _WORDS, _ROUNDS = 5, 200, 100
# Words of every rank's buffer, one page each: raised by peers, already set, to clear, the word of
# the rounds, and the numbers 1, 2, ...
_RAISED, _HOLDING, _CLEARED, _BALL, _NUMBERS = (4096 * page for page in range(5))


def signal_costs(ranks: Ranks, recv: RecvBuffer) -> dict[str, float]:
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

    def us_of(enqueue: Enqueue, calls: int = _BATCHES, words: int = _WORDS) -> float:
        return ranks.slowest(ranks.timed(enqueue, calls) / words)

    if copied:  # of a word that holds 1
        first = peer_base + _RAISED
        copies = _copying(lambda i: (first + i % _WORDS * 4, base + _NUMBERS), 4)
        signal = us_of(copies, _BATCHES * _WORDS, 1)
    else:
        signal = us_of(_batch(False, peer_base + _RAISED))
    clear = us_of(_batch(False, base + _CLEARED))
    wait = us_of(_batch(True, base + _HOLDING))
    round_trip = ranks.timed(_round(ranks, recv, copied), _ROUNDS)
    half = max(ranks.gather(round_trip)[:2]) / 2
    ranks.meet()
    return {
        "signal_us": signal,
        "raise_us": max(0.0, half - signal - wait),
        "wait_us": wait,
        "clear_us": clear,
    }


def _batch(waits: bool, first: int) -> Enqueue:
    """Return batches of waits or of writes of words."""
    commands = [WordCommand(waits, first + 4 * i, 1) for i in range(_WORDS)]
    return lambda _: driver.words(commands, torch.cuda.current_stream().cuda_stream)


def _round(ranks: Ranks, recv: RecvBuffer, copied: bool) -> Enqueue | None:
    """Return round trips of a word between rank 0 and rank 1; other ranks run nothing.

    Each round raises its own number, so no word has to be cleared in between.
    """
    if ranks.rank > 1:
        return None
    own_word, peer_word = recv.bases[ranks.rank] + _BALL, recv.bases[1 - ranks.rank] + _BALL
    numbers = recv.bases[ranks.rank] + _NUMBERS

    def run(at: int) -> None:
        stream, number = torch.cuda.current_stream().cuda_stream, at + 1
        send, wait = WordCommand(False, peer_word, number), WordCommand(True, own_word, number)
        if not copied:
            driver.words([send, wait] if ranks.rank == 0 else [wait, send], stream)
            return
        if ranks.rank == 1:
            driver.words([wait], stream)
        driver.copy(peer_word, numbers + 4 * at, 4, stream)
        if ranks.rank == 0:
            driver.words([wait], stream)

    return run


# ---- collectives

_BYTES_OUT = tuple((256 << 10) << 2 * i for i in range(7))  # 256 KiB .. 1 GiB
_ALIGN = 512
_MOST_CALLS, _RUN_BYTES = 20, 1 << 30
Move = Callable[[int, int], object]  # arguments: offset in both buffers, and size of a piece


def piece_bytes(bytes_out: int, world: int) -> int:
    """Return the aligned bytes to each peer for about `bytes_out` bytes that leave a rank."""
    return max(1, bytes_out // ((world - 1) * _ALIGN)) * _ALIGN


def collective_times(ranks: Ranks) -> dict[str, Points]:
    """Return (bytes out of a rank, us) of every collective, on the slowest rank.

    The byte count assumes that every rank sends each peer its piece once; twice in an all-reduce.
    """
    world = ranks.world
    elements = world * piece_bytes(_BYTES_OUT[-1], world) // 2
    source = torch.zeros(elements, dtype=torch.bfloat16, device=ranks.device)
    target = torch.zeros_like(source)
    points: dict[str, Points] = {name: [] for name in COLLECTIVES}
    for name, move in _moves(source, target, world).items():
        passes = 2 if name == "all_reduce" else 1
        for bytes_out in _BYTES_OUT:
            piece = piece_bytes(bytes_out // passes, world)
            calls = max(4, min(_MOST_CALLS, _RUN_BYTES // bytes_out))
            sets = max(1, min(calls, 2 * elements // (world * piece)))

            def run(i: int, move: Move = move, piece: int = piece, sets: int = sets) -> None:
                move(i % sets * world * piece // 2, piece // 2)

            us = ranks.slowest(ranks.timed(run, calls))
            points[name].append((passes * (world - 1) * piece, us))
    return points


def _moves(source: Any, target: Any, world: int) -> dict[str, Move]:
    """Return every collective as a function of an offset and a piece, in elements."""

    def all_gather(at: int, piece: int) -> object:
        whole = target[at : at + world * piece]
        return distributed.all_gather(whole, source[at : at + piece])

    def reduce_scatter(at: int, piece: int) -> object:
        whole = source[at : at + world * piece]
        return distributed.reduce_scatter(target[at : at + piece], whole)

    def all_reduce(at: int, piece: int) -> object:
        return dist.all_reduce(source[at : at + world * piece])

    def all_to_all(at: int, piece: int) -> object:
        end = at + world * piece
        return dist.all_to_all_single(target[at:end], source[at:end])

    return {
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_reduce": all_reduce,
        "all_to_all": all_to_all,
    }
