"""Copy engine rates between GPUs: by size, by number of peers, and by row width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ficco.profiling.figures import Points, gbps, latency_and_rates, links_per, net_rates
from ficco.profiling.gpu import driver
from ficco.profiling.gpu.ranks import Ranks, new_stream
from ficco.profiling.gpu.recv_buffer import MIB, RecvBuffer

__all__ = ["measure"]

_SIZES = tuple(4096 << shift for shift in (0, 4, 6, 8, 10, 12, 14, 16))  # 4 KiB .. 256 MiB
_LARGEST = _SIZES[-1]
_TURNED = tuple(65536 << shift for shift in (0, 2, 4, 6, 8, 10))  # 64 KiB .. 64 MiB
_LEAST_US = 0.01  # curves must not contain zeros
_OUT_BYTES, _IN_BYTES, _BOX_BYTES = 32 * MIB, 64 * MIB, 16 * MIB
_ROW_BYTES = tuple(256 << i for i in range(7))  # 256 B .. 16 KiB
_PITCHES = 8  # ratio of the pitch to the width of a box's rows
_COPIES, _MOST_COPIES, _MOST_BYTES = 4, 64, 1 << 30
_LANE_COPIES = 16  # consecutive copies; so many that the fixed costs of a run are negligible


def measure(ranks: Ranks, recv: RecvBuffer) -> dict[str, Any]:
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


def _by_size(ranks: Ranks, recv: RecvBuffer, source: torch.Tensor) -> Points:
    """Return (bytes, us of one copy): each rank sends consecutive copies to the next rank."""
    target, source_base = recv.bases[(ranks.rank + 1) % ranks.world], source.data_ptr()
    points = []
    for size in _SIZES:
        count = max(_COPIES, min(_MOST_COPIES, _MOST_BYTES // size))

        def run(size: int = size, count: int = count) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for i in range(count):
                offset = i * size % _LARGEST
                driver.copy(target + offset, source_base + offset, size, stream)

        points.append((size, ranks.slowest(ranks.timed(run, count))))
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
    peers = [(ranks.rank + distance) % ranks.world for distance in range(1, ranks.world)]
    source_base, points = source.data_ptr(), []
    for size in _TURNED:
        rounds = max(2, min(_MOST_COPIES, _MOST_BYTES // size) // len(peers))
        place = ranks.rank * _TURNED[-1]

        def run(size: int = size, rounds: int = rounds, place: int = place) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for number in range(rounds):
                for peer in peers:
                    offset = number * size % _TURNED[-1]
                    driver.copy(recv.bases[peer] + place, source_base + offset, size, stream)

        us = ranks.slowest(ranks.timed(run, rounds * len(peers)))
        points.append((size, max(_LEAST_US, us - alone[size])))
    return {"turn_us": points}


def _to_several(ranks: Ranks, recv: RecvBuffer, source: torch.Tensor, latency_us: float) -> Points:
    """Return (peers, total GB/s): each rank sends to `peers` peers, with one stream per peer."""
    streams = [new_stream() for _ in range(ranks.world - 1)]
    place = ranks.rank * _OUT_BYTES
    points = []
    for peers in range(1, ranks.world):
        lanes = [
            (streams[lane], recv.bases[(ranks.rank + 1 + lane) % ranks.world] + place)
            for lane in range(peers)
        ]

        def run(lanes: list[tuple[Any, int]] = lanes) -> None:
            main = torch.cuda.current_stream()
            for lane, (stream, target) in enumerate(lanes):
                stream.wait_stream(main)
                source_address = source.data_ptr() + lane % _COPIES * _OUT_BYTES
                for _ in range(_LANE_COPIES):
                    driver.copy(target, source_address, _OUT_BYTES, stream.cuda_stream)
            for stream, _ in lanes:
                main.wait_stream(stream)

        us = ranks.slowest(ranks.timed(run, _LANE_COPIES)) - latency_us
        points.append((peers, gbps(peers * _OUT_BYTES, us)))
    return points


def _from_several(
    ranks: Ranks, recv: RecvBuffer, source: torch.Tensor, latency_us: float
) -> Points:
    """Return (peers, total GB/s): `peers` ranks send to rank 0 at once."""
    target = recv.bases[0] + ranks.rank * _IN_BYTES

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for _ in range(_LANE_COPIES):
            driver.copy(target, source.data_ptr(), _IN_BYTES, stream)

    points = []
    for peers in range(1, ranks.world):
        sends: Callable[[], None] | None = run if 1 <= ranks.rank <= peers else None
        rank_us = ranks.timed(sends, _LANE_COPIES)
        us = ranks.slowest(rank_us if sends else 0.0) - latency_us
        points.append((peers, gbps(peers * _IN_BYTES, us)))
    return points


def _by_row(ranks: Ranks, recv: RecvBuffer, source: torch.Tensor) -> Points:
    """Return (bytes of a row, us of a box): copy parts of wider rows to packed rows."""
    target, source_base = recv.bases[(ranks.rank + 1) % ranks.world], source.data_ptr()
    points = []
    for width in _ROW_BYTES:
        box = (_BOX_BYTES // width, width)

        def run(width: int = width, box: tuple[int, int] = box) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for turn in range(_LANE_COPIES):
                driver.copy_rows(
                    target, width, source_base + turn * width, _PITCHES * width, box, stream
                )

        points.append((width, ranks.slowest(ranks.timed(run, _LANE_COPIES))))
    return points
