"""The slowdown of a GEMM and a transfer that run side by side (contention-induced loss)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ficco.measuring.clock import captured
from ficco.profiling.figures import slower
from ficco.profiling.gpu import driver
from ficco.profiling.gpu.operands import Pool
from ficco.profiling.gpu.ranks import Ranks
from ficco.profiling.gpu.recv_buffer import MIB, RecvBuffer
from ficco.profiling.grids import Shape
from ficco.runtime import distributed

__all__ = ["measure", "worst"]

_SHAPE = (10240, 3584, 8192)  # m, n, k
_CHUNKS = (64 * MIB, 4 * MIB, MIB // 2)
_TRUSTED = 2  # a profile uses this many of the largest chunks
_PIECE_BYTES = 32 * MIB  # a rank's input of the all-gather
_RUN_US = 4000.0
_COVER = 3  # the background work takes this many times longer than the timed work


class _Work(NamedTuple):
    """Work of one stream.

    Attributes:
        graph: the captured work.
        us: its time alone, on the slowest rank.
    """

    graph: Any
    us: float


def measure(ranks: Ranks, recv: RecvBuffer, shape: Shape = _SHAPE) -> list[dict[str, float]]:
    """Return the slowdowns of a GEMM beside copies of 64 MiB, 4 MiB and 512 KiB, and an all-gather.

    Each entry has `chunk_bytes` (0: the all-gather) and the factors by which each of the two is
    slower beside the other, `gemm` and `transfer`.
    """
    m, n, k = shape
    inputs = Pool(4 * (m * k + n * k), ranks.device)
    y = torch.empty((m, n), dtype=torch.bfloat16, device=ranks.device)

    def multiply(_: int) -> None:
        torch.mm(inputs.take(m, k), inputs.take(n, k).t(), out=y)

    gemm = _work(ranks, multiply)
    losses = []
    source = torch.zeros(_CHUNKS[0], dtype=torch.uint8, device=ranks.device)
    for size in _CHUNKS:
        copies = _work(ranks, _pushing(ranks, recv, source, size))
        losses.append({"chunk_bytes": float(size), **_losses(ranks, gemm, copies)})
    piece = torch.zeros(_PIECE_BYTES // 2, dtype=torch.bfloat16, device=ranks.device)
    whole = piece.new_zeros(ranks.world * piece.numel())
    gathering = _work(ranks, lambda _: distributed.all_gather(whole, piece))
    losses.append({"chunk_bytes": 0.0, **_losses(ranks, gemm, gathering)})
    return losses


def worst(losses: list[dict[str, float]]) -> dict[str, float]:
    """Return a profile's contention costs from the result of `measure`."""
    copies = sorted(losses, key=lambda entry: -entry["chunk_bytes"])[:_TRUSTED]
    (gathering,) = (entry for entry in losses if not entry["chunk_bytes"])
    return {
        "gemm_beside_copies": max(entry["gemm"] for entry in copies),
        "copies_beside_gemm": max(entry["transfer"] for entry in copies),
        "gemm_beside_collective": gathering["gemm"],
        "collective_beside_gemm": gathering["transfer"],
    }


def _pushing(
    ranks: Ranks, recv: RecvBuffer, source: torch.Tensor, size: int
) -> Callable[[int], None]:
    """Return pushes to one peer after another; at any time, all ranks push to different peers."""
    peers = [(ranks.rank + turn) % ranks.world for turn in range(1, ranks.world)]
    chunks = _CHUNKS[0] // size
    place = ranks.rank * _CHUNKS[0]

    def push(number: int) -> None:
        offset = number % chunks * size
        target = recv.bases[peers[number // chunks % len(peers)]] + place + offset
        stream = torch.cuda.current_stream().cuda_stream
        driver.copy(target, source.data_ptr() + offset, size, stream)

    return push


def _work(ranks: Ranks, one: Callable[[int], object]) -> _Work:
    """Capture as many repetitions of `one` as take about _RUN_US."""

    def run(count: int) -> Callable[[], None]:
        def enqueue() -> None:
            for number in range(count):
                one(number)

        return enqueue

    few = 4
    count = max(few, round(_RUN_US / ranks.slowest(ranks.timed(run(few), few))))
    graph = captured(run(count))
    return _Work(graph, ranks.slowest(ranks.replayed(graph)))


def _losses(ranks: Ranks, gemm: _Work, transfer: _Work) -> dict[str, float]:
    def beside(other: _Work, timed: _Work) -> float:
        copies = max(1, round(_COVER * timed.us / other.us))
        return slower(ranks.slowest(ranks.beside(other.graph, copies, timed.graph)), timed.us)

    return {"gemm": beside(transfer, gemm), "transfer": beside(gemm, transfer)}
