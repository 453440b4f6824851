"""Times of torch.distributed's collectives, by the bytes that leave a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ficco.machine import COLLECTIVES
from ficco.profiling.figures import Points
from ficco.profiling.gpu.ranks import Ranks
from ficco.runtime import distributed

__all__ = ["measure", "piece_bytes"]

_BYTES_OUT = tuple((256 << 10) << 2 * i for i in range(7))  # 256 KiB .. 1 GiB
_ALIGN = 512
_MOST_CALLS, _RUN_BYTES = 20, 1 << 30
Move = Callable[[int, int], object]  # arguments: offset in both buffers, and size of a piece


def piece_bytes(bytes_out: int, world: int) -> int:
    """Return the aligned bytes to each peer for about `bytes_out` bytes that leave a rank."""
    return max(1, bytes_out // ((world - 1) * _ALIGN)) * _ALIGN


def measure(ranks: Ranks) -> dict[str, Points]:
    """Return (bytes out of a rank, us) of every collective, on the slowest rank.

    The byte count assumes that every rank sends each peer its piece once; twice in an all-reduce.
    """
    world = ranks.world
    room = world * piece_bytes(_BYTES_OUT[-1], world) // 2
    source = torch.zeros(room, dtype=torch.bfloat16, device=ranks.device)
    target = torch.zeros_like(source)
    points: dict[str, Points] = {name: [] for name in COLLECTIVES}
    for name, move in _moves(source, target, world).items():
        passes = 2 if name == "all_reduce" else 1
        for bytes_out in _BYTES_OUT:
            piece = piece_bytes(bytes_out // passes, world)
            calls = max(4, min(_MOST_CALLS, _RUN_BYTES // bytes_out))

            def run(move: Move = move, piece: int = piece, calls: int = calls) -> None:
                sets = max(1, min(calls, 2 * room // (world * piece)))
                for i in range(calls):
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
