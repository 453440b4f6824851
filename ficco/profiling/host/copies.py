"""Copy rates of the host engine's lanes: by size, by number of peers, and by row width."""

from __future__ import annotations

from typing import Any

from ficco.plan import Step
from ficco.profiling.figures import Points, gbps, latency_and_rates, net_rates
from ficco.profiling.host.rig import COLS, ROW_BYTES, Rig, Steps, copy_step, lasted

__all__ = ["measure"]

_ROW_COUNTS = (1, 4, 16, 64, 256, 1024, 2048)  # rows of a copy: 8 KiB to 16 MiB
_LEAST, _MOST = 2, 64  # least and most copies of a run
_WIDTHS = (64, 256, 1024)  # columns of a box; 256 B .. 4 KiB, half a row


def measure(rig: Rig) -> dict[str, Any]:
    """Return a profile's link within a node, measured on the slowest of the ranks that copy.

    The number of concurrent copies is the number of cores. Ranks share one memory, so all copies of
    a rank share its rate, as they share a port.
    """
    latency, rates = latency_and_rates(_by_size(rig))
    link: dict[str, Any] = {"scope": "node", "per": "port", "latency_us": latency, "gbps": rates}
    if rig.world > 1:
        most = min(rig.world - 1, max(rig.cores // rig.active, 1))
        link["out_gbps"] = [_to_several(rig, peers) for peers in range(1, most + 1)]
        most = min(rig.world - 1, rig.cores)
        link["in_gbps"] = [_from_several(rig, peers) for peers in range(1, most + 1)]
    link["row_gbps"] = net_rates(_by_width(rig), latency)
    return link


def _by_size(rig: Rig) -> Points:
    """Return (bytes, us of one copy), for consecutive copies on one lane."""
    points = []
    most = rig.extent.rows
    for rows in (count for count in _ROW_COUNTS if count <= most):
        count = max(_LEAST, min(_MOST, 2 * most // rows))

        def steps(rank: int, rows: int = rows, count: int = count) -> list[Step]:
            peer, places = (rank + 1) % rig.world, most // rows
            return [
                _push(f"copy{i}", "push", rank, peer, (i % places * rows, rows))
                for i in range(count if rank < rig.active else 0)
            ]

        points.append((rows * ROW_BYTES, _us(rig, steps) / count))
    return points


def _to_several(rig: Rig, peers: int) -> tuple[int, float]:
    """Return (peers, total GB/s): every rank copies to `peers` peers, with one lane per peer."""
    rows = rig.extent.rows // rig.world

    def steps(rank: int) -> list[Step]:
        return [
            _push(f"copy{i}to{distance}", f"push{distance}", rank, (rank + distance) % rig.world,
                  (rank * rows, rows))
            for i in range(_LEAST if rank < rig.active else 0)
            for distance in range(1, peers + 1)
        ]  # fmt: skip

    return peers, gbps(peers * _LEAST * rows * ROW_BYTES, _us(rig, steps))


def _from_several(rig: Rig, peers: int) -> tuple[int, float]:
    """Return (peers, total GB/s): `peers` ranks copy to rank 0 at once."""
    rows = rig.extent.rows // rig.world

    def steps(rank: int) -> list[Step]:
        count = _LEAST if 1 <= rank <= peers else 0
        return [_push(f"copy{i}", "push", rank, 0, (rank * rows, rows)) for i in range(count)]

    return peers, gbps(peers * _LEAST * rows * ROW_BYTES, _us(rig, steps))


def _by_width(rig: Rig) -> list[tuple[int, int, float]]:
    """Return (bytes of a row, bytes of a box, us): copies of some columns of wider rows."""
    points = []
    for width in _WIDTHS:

        def steps(rank: int, width: int = width) -> list[Step]:
            peer, box = (rank + 1) % rig.world, (0, rig.extent.rows, 0, width)
            count = _LEAST if rank < rig.active else 0
            return [copy_step(f"copy{i}", "push", rank, peer, box) for i in range(count)]

        row_bytes = width * ROW_BYTES // COLS
        points.append((row_bytes, row_bytes * rig.extent.rows, _us(rig, steps) / _LEAST))
    return points


def _push(name: str, lane: str, rank: int, peer: int, rows: tuple[int, int]) -> Step:
    """Return a copy of whole rows; `rows`: (first, count)."""
    first, count = rows
    return copy_step(name, lane, rank, peer, (first, first + count, 0, COLS))


def _us(rig: Rig, steps: Steps) -> float:
    """Return the time of all copies of a plan, on the slowest rank, in the fastest run."""
    return min(max(lasted(spans)) for spans in rig.spans(steps))
