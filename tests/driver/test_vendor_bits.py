"""The engine's results on both vendors' doubles are the same bits.

The plans are the same, and so are the GEMMs, which are NumPy's. Copies, signals, waits and windows
differ. CI takes each number of ranks and each dtype at least twice; `--complete` takes all pairs.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from double_control import environment
from forking import run_forked

WORKER = Path(__file__).with_name("vendor_bits_worker.py")
DTYPES = ("float32", "float16", "bfloat16")
WORLDS = range(1, 9)
OFTEN = {(world, DTYPES[world % len(DTYPES)]) for world in WORLDS}  # in CI


def lines_of(double: Path, folder: Path, vendor: str, world: int, dtype: str) -> list[str]:
    """Return the worker's lines for a vendor, without what the library logs."""
    mine = folder / vendor
    mine.mkdir()
    given = environment(double, devices=8) | {"FICCO_PROBES": "0", "OPENBLAS_NUM_THREADS": "1"}
    code, said = run_forked(
        WORKER, vendor, world, dtype, folder=mine, environment=given, timeout=120
    )
    assert code == 0, said
    return [line for line in said.splitlines() if "_" in line.partition(" ")[0]]


@pytest.mark.parametrize(("world", "dtype"), list(product(WORLDS, DTYPES)))
def test_both_vendors_make_the_same_bits(
    double_folder: Path, hip_folder: Path, tmp_path: Path, world: int, dtype: str,
    request: pytest.FixtureRequest, torch: object,
) -> None:  # fmt: skip
    if (world, dtype) not in OFTEN and not request.config.getoption("--complete"):
        pytest.skip("--complete runs all numbers of ranks with all dtypes")
    cuda = lines_of(double_folder, tmp_path, "cuda", world, dtype)
    hip = lines_of(hip_folder / "hip_double", tmp_path, "hip", world, dtype)
    assert len(cuda) > 40, cuda
    assert cuda == hip
