"""The gated GEMM: on the CPU under Triton's interpreter, and as it is compiled for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ficco.kernels.tiling import TILES, choose_tile, count_tiles

WORKER = Path(__file__).with_name("gated_worker.py")


def run_worker(subject: str, folder: Path, interpret: str) -> None:
    settings = {"TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": "cache"}
    done = subprocess.run(
        [sys.executable, WORKER, subject], env=os.environ | settings,
        capture_output=True, text=True, cwd=folder, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "right" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("subject", ["products", "giving_up", "late", "warming", "refusals"])
def test_it_is_right(subject: str, tmp_path: Path, torch: object) -> None:
    run_worker(subject, tmp_path, "1")


def test_what_is_compiled_loads_behind_the_fence_and_stores_in_order(
    tmp_path: Path, torch: object
) -> None:
    run_worker("assembly", tmp_path, "0")


@pytest.mark.parametrize("element_bytes", TILES)
def test_a_tile_is_chosen_by_rows_and_rounds(element_bytes: int) -> None:
    tiles = TILES[element_bytes]
    for rows in ([8192] * 8, [1024] * 8, [100] * 4, [64], [3, 1], []):
        for n in (64, 1280, 2560, 14336):
            tile = choose_tile(rows, n, element_bytes, 132)
            smallest = min(other.rows for other in tiles)
            assert tile in tiles
            assert tile.rows == smallest or tile.rows < 2 * max(rows), (
                "a part's rows bound a tile's"
            )
    assert choose_tile([8192] * 8, 14336, element_bytes, 132) == tiles[0]
    assert choose_tile([8192] * 8, 14336, element_bytes, 132, aligned=False) == tiles[-1]
    few = choose_tile([64], 1024, element_bytes, 132)
    assert sum(count_tiles([64], 1024, few)) > sum(count_tiles([64], 1024, tiles[0]))


def test_tiles_do_not_straddle_parts() -> None:
    tile = TILES[2][0]._replace(rows=128, cols=256)
    assert count_tiles([1, 128, 129, 0], 257, tile) == [2, 2, 4, 0]
