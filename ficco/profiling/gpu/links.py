"""What copy engines move from GPU to GPU: by size, by peers at once, and by rows of a box."""

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
_LEAST_US = 0.01  # a curve has no zeros
_OUT_BYTES, _IN_BYTES, _BOX_BYTES = 32 * MIB, 64 * MIB, 16 * MIB
_ROW_BYTES = tuple(256 << i for i in range(7))  # 256 B .. 16 KiB
_PITCHES = 8  # rows of a box are so much narrower than those they are cut from
_COPIES, _MOST_COPIES, _MOST_BYTES = 4, 64, 1 << 30
_LANE_COPIES = 16  # behind one another, so that what a run costs besides is lost among them


def measure(ranks: Ranks, recv: RecvBuffer) -> dict[str, Any]:
    """Return a profile's link within a node; all ranks send at once, figures are the slowest's.

    All rates are without the latency of a copy, which a profile has apart.
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
    """Return (bytes, us of one copy): each rank to the next, copies behind one another."""
    there, here = recv.bases[(ranks.rank + 1) % ranks.world], source.data_ptr()
    found = []
    for size in _SIZES:
        count = max(_COPIES, min(_MOST_COPIES, _MOST_BYTES // size))

        def run(size: int = size, count: int = count) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for i in range(count):
                at = i * size % _LARGEST
                driver.copy(there + at, here + at, size, stream)

        found.append((size, ranks.slowest(ranks.timed(run, count))))
    return found


def _turning(
    ranks: Ranks, recv: RecvBuffer, source: torch.Tensor, alone: dict[int, float]
) -> dict[str, Points]:
    """Return (bytes, us that a copy lasts longer) where every copy goes to another peer.

    All ranks push to rank+1, rank+2, ... in turn, again and again, and drift apart as they like.
    With two ranks nobody turns.
    """
    if ranks.world < 3:
        return {}
    peers = [(ranks.rank + turn) % ranks.world for turn in range(1, ranks.world)]
    here, found = source.data_ptr(), []
    for size in _TURNED:
        rounds = max(2, min(_MOST_COPIES, _MOST_BYTES // size) // len(peers))
        place = ranks.rank * _TURNED[-1]

        def run(size: int = size, rounds: int = rounds, place: int = place) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for number in range(rounds):
                for peer in peers:
                    at = number * size % _TURNED[-1]
                    driver.copy(recv.bases[peer] + place, here + at, size, stream)

        us = ranks.slowest(ranks.timed(run, rounds * len(peers)))
        found.append((size, max(_LEAST_US, us - alone[size])))
    return {"turn_us": found}


def _to_several(ranks: Ranks, recv: RecvBuffer, source: torch.Tensor, latency_us: float) -> Points:
    """Return (peers, GB/s of all): each rank to so many peers, a stream each."""
    streams = [new_stream() for _ in range(ranks.world - 1)]
    place = ranks.rank * _OUT_BYTES
    found = []
    for peers in range(1, ranks.world):
        lanes = [
            (streams[turn], recv.bases[(ranks.rank + 1 + turn) % ranks.world] + place)
            for turn in range(peers)
        ]

        def run(lanes: list[tuple[Any, int]] = lanes) -> None:
            main = torch.cuda.current_stream()
            for turn, (stream, there) in enumerate(lanes):
                stream.wait_stream(main)
                here = source.data_ptr() + turn % _COPIES * _OUT_BYTES
                for _ in range(_LANE_COPIES):
                    driver.copy(there, here, _OUT_BYTES, stream.cuda_stream)
            for stream, _ in lanes:
                main.wait_stream(stream)

        us = ranks.slowest(ranks.timed(run, _LANE_COPIES)) - latency_us
        found.append((peers, gbps(peers * _OUT_BYTES, us)))
    return found


def _from_several(
    ranks: Ranks, recv: RecvBuffer, source: torch.Tensor, latency_us: float
) -> Points:
    """Return (peers, GB/s of all): so many ranks to rank 0 at once."""
    there = recv.bases[0] + ranks.rank * _IN_BYTES

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for _ in range(_LANE_COPIES):
            driver.copy(there, source.data_ptr(), _IN_BYTES, stream)

    found = []
    for peers in range(1, ranks.world):
        sends: Callable[[], None] | None = run if 1 <= ranks.rank <= peers else None
        mine = ranks.timed(sends, _LANE_COPIES)
        us = ranks.slowest(mine if sends else 0.0) - latency_us
        found.append((peers, gbps(peers * _IN_BYTES, us)))
    return found


def _by_row(ranks: Ranks, recv: RecvBuffer, source: torch.Tensor) -> Points:
    """Return (bytes of a row, us of a box): rows out of wider ones, packed where they land."""
    there, here = recv.bases[(ranks.rank + 1) % ranks.world], source.data_ptr()
    found = []
    for width in _ROW_BYTES:
        box = (_BOX_BYTES // width, width)

        def run(width: int = width, box: tuple[int, int] = box) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for turn in range(_LANE_COPIES):
                driver.copy_rows(there, width, here + turn * width, _PITCHES * width, box, stream)

        found.append((width, ranks.slowest(ranks.timed(run, _LANE_COPIES))))
    return found
