"""The table for the release of the window at a launch's end; see `window_release_kernel`."""

from __future__ import annotations

from typing import Any, NamedTuple

from ficco.kernels.arrays import library_of
from ficco.kernels.one_kernel import ranks_as_bits
from ficco.operators.problem_checks import MAX_WORLD
from ficco.plan.tables import WindowRelease


class ReleaseTable(NamedTuple):
    """The kernel's table of the words that it clears and raises.

    Attributes:
        cleared: int32, indices of `cleared_count` own words.
        homes: int64 [2, MAX_WORLD], addresses of each rank's words, by copy of the window.
        ended: int32 [1], programs that have ended; 0 between launches, which must not overlap.
        raised: index of the word that is raised at peers.
        peers: one bit per peer.
        world: number of ranks up to the last peer.
    """

    cleared: Any
    cleared_count: int
    homes: Any
    ended: Any
    raised: int
    peers: int
    world: int


def release_table(release: WindowRelease, device: Any) -> ReleaseTable:
    """Return the table of a window's release.

    It copies to the device, so it must not be called while a stream waits or is captured.

    Args:
        release: the words.
        device: an array library (`Arrays`), or a torch.device.
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
