"""The pooling of several tables in one launch: under Triton's interpreter, and compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from forking import run_forked

from ficco.kernels.pooled_tables import choose_tile

WORKER = Path(__file__).with_name("pooled_tables_worker.py")


def run_worker(subject: str, folder: Path, interpret: str) -> None:
    settings = {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": "cache"}
    code, said = run_forked(WORKER, subject, folder=folder, environment=settings, timeout=200)
    assert code == 0 and "right" in said, said


@pytest.mark.parametrize("subject", ["values", "tiles", "torch_rules", "refusals"])
def test_pooling_is_right(subject: str, tmp_path: Path, torch: object) -> None:
    run_worker(subject, tmp_path, "1")


def test_what_is_compiled_loads_16_bytes_and_needs_no_barrier(
    tmp_path: Path, torch: object
) -> None:
    run_worker("assembly", tmp_path, "0")


@pytest.mark.parametrize(
    ("dims", "dtype", "cols"),
    [
        ((64,), "bfloat16", 64), ((256, 256), "float32", 256), ((1,), "float16", 16),
        ((200,), "bfloat16", 256), ((64, 64, 64, 128), "bfloat16", 64), ((512,), "bfloat16", 256),
    ],
)  # fmt: skip
def test_a_block_has_the_columns_that_cost_least(
    dims: tuple[int, ...], dtype: str, cols: int
) -> None:
    assert choose_tile(dims, (0,) * len(dims), dtype).cols == cols


@pytest.mark.parametrize("dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize(("dtype", "edge"), [("bfloat16", 8), ("float32", 4), ("float32", 1)])
def test_each_thread_loads_whole_elements_of_16_bytes(dim: int, dtype: str, edge: int) -> None:
    tile = choose_tile((dim,), (0 if edge > 1 else 1,), dtype)
    loaded = tile.bags * tile.cols // (32 * tile.warps)  # elements of a thread of each lookup
    assert loaded % edge == 0 and tile.lookups * loaded >= 2 * edge
