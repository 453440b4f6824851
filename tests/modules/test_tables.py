"""Gradients and updates of embedding tables, in processes. See tables_worker.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks_of_torch import run


@pytest.mark.parametrize("world", [1, 3, 8])
def test_gradients_and_updates_of_tables(world: int, tmp_path: Path, torch: Any) -> None:
    run("tables_worker.py", world, tmp_path, "cpu")


def test_tables_agree_with_torchrec(
    tmp_path: Path, torch: Any, request: pytest.FixtureRequest
) -> None:
    """Skipped where TorchRec or FBGEMM is missing; `--require torchrec` fails instead."""
    if "torchrec" not in request.config.getoption("--require"):
        pytest.importorskip("fbgemm_gpu")
        pytest.importorskip("torchrec")
    run("torchrec_worker.py", 2, tmp_path)
