"""All ranks in one process, on NumPy arrays: compare schedules, and look at what a call did.

python examples/node_numpy.py
"""

from __future__ import annotations

import numpy as np

import ficco

RANKS, ROWS, WIDTH, COLUMNS = 4, 160, 512, 64  # of one rank's shards


def main() -> None:
    """Gather and multiply under three schedules on a paced machine of four ranks."""
    rng = np.random.default_rng(0)
    # Shards may be uneven: rank r has ROWS + 32 r rows of x, and all have COLUMNS columns of w.
    xs = [rng.random((ROWS + 32 * rank, WIDTH), np.float32) for rank in range(RANKS)]
    ws = [rng.random((WIDTH, COLUMNS), np.float32) for _ in range(RANKS)]
    expected = [np.concatenate(xs) @ w for w in ws]

    # "mesh4" is paced: its copies and GEMMs last as long as the profile says, on any machine.
    # "host" runs as fast as this machine can.
    with ficco.Node(RANKS, machine="mesh4") as node:
        for schedule in ("serial", "shard_p2p", "hetero_fused_1d"):
            ys = node.all_gather_matmul(xs, ws, schedule=schedule)
            for y, right in zip(ys, expected, strict=True):
                np.testing.assert_allclose(y, right, rtol=1e-5)
            timeline = node.timeline()
            print(f"{schedule:16} {timeline.duration_us / 1e3:6.1f} ms")

    # The timeline of the last call: one span for each step of each rank.
    pushes = [span for span in timeline.spans if span.rank == 0 and span.kind == "copy"]
    for span in pushes[:3]:
        times = f"{span.start_us / 1e3:.1f} to {span.end_us / 1e3:.1f} ms"
        print(f"rank 0 {span.step}: {span.bytes} bytes from {times}")


if __name__ == "__main__":
    main()
