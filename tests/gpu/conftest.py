"""GPUs for the tests in this folder; without them they are skipped, or fail with --require gpu."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # behind folders whose files have the same names


@pytest.fixture(scope="session")
def gpus(request: pytest.FixtureRequest) -> int:
    """Number of GPUs that reach each other."""
    required = "gpu" in request.config.getoption("--require")
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except ModuleNotFoundError:
        count = 0
    if count < 2:
        assert not required, f"{count} GPUs found, 2 or more are required"
        pytest.skip(f"{count} GPUs found, 2 or more are needed")
    return count


@pytest.fixture(params=["a rank a GPU", "8 ranks"])
def ranks(request: pytest.FixtureRequest, gpus: int) -> int:
    """Number of ranks: one on each GPU, or 8, which share the GPUs where these are fewer."""
    if request.param == "a rank a GPU":
        return gpus
    if gpus >= 8:
        pytest.skip(f"{gpus} GPUs found: ranks need not share them")
    return 8
