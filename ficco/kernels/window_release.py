"""The table by which a launch gives the window back when it ends; see `window_release_kernel`."""

from __future__ import annotations

from typing import Any, NamedTuple

from ficco.kernels.arrays import library_of
from ficco.kernels.gated_parts import WindowRelease
from ficco.kernels.one_kernel import ranks_as_bits
from ficco.problem import MAX_WORLD

__all__ = ["ReleaseTable", "release_table"]


class ReleaseTable(NamedTuple):
    """What the kernel reads of words that it clears and raises.

    Attributes:
        cleared: int32, indices of own words; `cleared_count` of them.
        homes: int64 [2, MAX_WORLD]: where each rank's words begin, by copy of the window.
        ended: int32 [1], programs that have ended; 0 between launches, which must not overlap.
        raised: index of the word that is raised at peers.
        peers: a bit each.
        world: ranks up to the last peer.
    """

    cleared: Any
    cleared_count: int
    homes: Any
    ended: Any
    raised: int
    peers: int
    world: int


def release_table(release: WindowRelease, device: Any) -> ReleaseTable:
    """Return the table of a launch's last words.

    Copies to the device, so not while a stream waits or is captured.

    Args:
        release: which words.
        device: a library of arrays (`Arrays`), or a torch.device.
    """
    arrays = library_of(device)
    rows = [[*ranks, *[0] * (MAX_WORLD - len(ranks))] for ranks in release.homes]
    return ReleaseTable(
        cleared=arrays.place(list(release.cleared) or [0], "int32"),
        cleared_count=len(release.cleared),
        homes=arrays.place(rows, "int64"),
        ended=arrays.place([0], "int32"),
        raised=release.raised,
        peers=ranks_as_bits(release.peers),
        world=max(release.peers, default=0) + 1,
    )
