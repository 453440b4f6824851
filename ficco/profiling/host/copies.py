"""What the host engine's lanes copy: by size, by peers at once, and by rows of a box."""

from __future__ import annotations

from typing import Any

from ficco.plan import Step
from ficco.profiling.figures import Points, gbps, latency_and_rates, net_rates
from ficco.profiling.host.rig import COLS, ROW_BYTES, Rig, Steps, copy_step, lasted

__all__ = ["measure"]

_ROW_COUNTS = (1, 4, 16, 64, 256, 1024, 2048)  # of a copy: 8 KiB to 16 MiB
_LEAST, _MOST = 2, 64  # copies of a run
_WIDTHS = (64, 256, 1024)  # columns of a box; 256 B .. 4 KiB, half a row


def measure(rig: Rig) -> dict[str, Any]:
    """Return a profile's link within a node: of ranks that copy at once, the slowest's figures.

    As many copies go on at once as there are cores. Ranks share one memory, so what a rank reaches
    is shared by all its copies, as by a port.
    """
    latency, rates = latency_and_rates(_by_size(rig))
    found: dict[str, Any] = {"scope": "node", "per": "port", "latency_us": latency, "gbps": rates}
    if rig.world > 1:
        most = min(rig.world - 1, max(rig.cores // rig.active, 1))
        found["out_gbps"] = [_to_several(rig, peers) for peers in range(1, most + 1)]
        most = min(rig.world - 1, rig.cores)
        found["in_gbps"] = [_from_several(rig, peers) for peers in range(1, most + 1)]
    found["row_gbps"] = net_rates(_by_width(rig), latency)
    return found


def _by_size(rig: Rig) -> Points:
    """Return (bytes, us of one copy), behind one another on one lane."""
    found = []
    most = rig.extent.rows
    for rows in (count for count in _ROW_COUNTS if count <= most):
        count = max(_LEAST, min(_MOST, 2 * most // rows))

        def steps(rank: int, rows: int = rows, count: int = count) -> list[Step]:
            peer, places = (rank + 1) % rig.world, most // rows
            return [
                _push(f"copy{i}", "push", rank, peer, (i % places * rows, rows))
                for i in range(count if rank < rig.active else 0)
            ]

        found.append((rows * ROW_BYTES, _us(rig, steps) / count))
    return found


def _to_several(rig: Rig, peers: int) -> tuple[int, float]:
    """Return (peers, GB/s of all): every rank to so many, a lane each."""
    rows = rig.extent.rows // rig.world

    def steps(rank: int) -> list[Step]:
        return [
            _push(f"copy{i}to{turn}", f"push{turn}", rank, (rank + turn) % rig.world,
                  (rank * rows, rows))
            for i in range(_LEAST if rank < rig.active else 0)
            for turn in range(1, peers + 1)
        ]  # fmt: skip

    return peers, gbps(peers * _LEAST * rows * ROW_BYTES, _us(rig, steps))


def _from_several(rig: Rig, peers: int) -> tuple[int, float]:
    """Return (peers, GB/s of all): so many ranks to rank 0 at once."""
    rows = rig.extent.rows // rig.world

    def steps(rank: int) -> list[Step]:
        count = _LEAST if 1 <= rank <= peers else 0
        return [_push(f"copy{i}", "push", rank, 0, (rank * rows, rows)) for i in range(count)]

    return peers, gbps(peers * _LEAST * rows * ROW_BYTES, _us(rig, steps))


def _by_width(rig: Rig) -> list[tuple[int, int, float]]:
    """Return (bytes of a row, bytes of a box, us): columns out of wider rows, and into them."""
    found = []
    for width in _WIDTHS:

        def steps(rank: int, width: int = width) -> list[Step]:
            peer, box = (rank + 1) % rig.world, (0, rig.extent.rows, 0, width)
            count = _LEAST if rank < rig.active else 0
            return [copy_step(f"copy{i}", "push", rank, peer, box) for i in range(count)]

        row_bytes = width * ROW_BYTES // COLS
        found.append((row_bytes, row_bytes * rig.extent.rows, _us(rig, steps) / _LEAST))
    return found


def _push(name: str, lane: str, rank: int, peer: int, rows: tuple[int, int]) -> Step:
    """Return a copy of whole rows: (first, how many)."""
    first, count = rows
    return copy_step(name, lane, rank, peer, (first, first + count, 0, COLS))


def _us(rig: Rig, steps: Steps) -> float:
    """Return how long all of a plan's copies last, on the slowest rank, in the fastest run."""
    return min(max(lasted(spans)) for spans in rig.spans(steps))
