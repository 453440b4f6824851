"""The engine's results on both vendors' doubles are the same bits.

The plans are the same, and so are the GEMMs, which are NumPy's. Copies, signals, waits and windows
differ. CI takes every pair of operator, dtype and number of ranks; `--complete` takes all three.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from double_control import environment
from forking import run_forked
from vendor_bits_worker import DTYPES, SHARED, chosen

WORKER = Path(__file__).with_name("vendor_bits_worker.py")


def lines_of(double: Path, folder: Path, vendor: str, world: int, how: str) -> list[str]:
    """Return the worker's lines for a vendor, without what the library logs."""
    mine = folder / vendor
    mine.mkdir()
    given = environment(double, devices=8) | {"FICCO_PROBES": "0", "OPENBLAS_NUM_THREADS": "1"}
    code, said = run_forked(WORKER, vendor, world, how, folder=mine, environment=given, timeout=200)
    assert code == 0, said
    return [line for line in said.splitlines() if line.partition(" ")[0] in SHARED]


@pytest.mark.parametrize("world", range(1, 9))
def test_both_vendors_make_the_same_bits(
    double_folder: Path, hip_folder: Path, tmp_path: Path, world: int,
    request: pytest.FixtureRequest, torch: object,
) -> None:  # fmt: skip
    how = "complete" if request.config.getoption("--complete") else "pairwise"
    cuda = lines_of(double_folder, tmp_path, "cuda", world, how)
    hip = lines_of(hip_folder / "hip_double", tmp_path, "hip", world, how)
    assert len(cuda) > 2 * len(SHARED), cuda
    assert {line.split()[0] for line in cuda} == set(SHARED)
    assert cuda == hip


def test_ci_has_every_pair() -> None:
    """Of operator and dtype, operator and number of ranks, dtype and number of ranks."""
    every = [
        (op, dtype, world)
        for op in SHARED for dtype in DTYPES for world in range(1, 9) if chosen(op, dtype, world)
    ]  # fmt: skip
    assert len({(op, dtype) for op, dtype, _ in every}) == len(SHARED) * len(DTYPES)
    assert len({(op, world) for op, _, world in every}) == len(SHARED) * 8
    assert len({(dtype, world) for _, dtype, world in every}) == len(DTYPES) * 8
