"""The direct kernel, from tables of real plans: under Triton's interpreter, and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("direct_worker.py")


@pytest.mark.parametrize(
    ("subjects", "interpret"), [("products", "1"), ("giving_up refusals", "1"), ("assembly", "0")]
)
def test_it_is_right(subjects: str, interpret: str, tmp_path: Path, torch: object) -> None:
    settings = {"TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": "cache"}
    done = subprocess.run(
        [sys.executable, WORKER, *subjects.split()], env=os.environ | settings,
        capture_output=True, text=True, cwd=tmp_path, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "right" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("m", [1, 2, 16, 33, 64, 100, 512])
def test_a_tile_covers_its_chunk_and_leaves_room(m: int, item: int, torch: object) -> None:
    from ficco.kernels.direct import choose_tile

    for width in (1, 16, 32, 40, 64, 112, 128, 1000):
        for k in (1, 64, 1000, 13312):
            tile = choose_tile(m, width, k, item)
            assert all(size & (size - 1) == 0 for size in tile[:3])
            assert (tile.rows == 1) == (m == 1) and tile.cols <= max(16, 2 * width)
            assert tile.warps in (4, 8) and tile.stages >= 2
            held = (tile.rows + tile.cols) * tile.deep * tile.stages * item
            assert held <= 140_000 + (m == 1) * 8192, "no other kernel fits beside"
