"""GPUs for the tests in this folder; without them they are skipped, or fail with --require gpu."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # behind folders whose files have the same names


def _count() -> int:
    try:
        import torch
    except ModuleNotFoundError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _at_least(needed: int, request: pytest.FixtureRequest) -> int:
    found = _count()
    if found < needed:
        told = f"{found} GPUs found, {needed} or more are needed"
        assert "gpu" not in request.config.getoption("--require"), told
        pytest.skip(told)
    return found


@pytest.fixture(scope="session")
def gpus(request: pytest.FixtureRequest) -> int:
    """Number of GPUs that reach each other: 2 or more."""
    return _at_least(2, request)


@pytest.fixture(scope="session")
def shared_gpus(request: pytest.FixtureRequest) -> int:
    """Number of GPUs, which more ranks than these may share: 1 or more."""
    return _at_least(1, request)


@pytest.fixture(params=["a rank a GPU", "8 ranks"])
def ranks(request: pytest.FixtureRequest) -> int:
    """Number of ranks: one on each GPU, or 8, which share the GPUs where these are fewer."""
    if request.param == "a rank a GPU":
        return _at_least(2, request)
    found = _at_least(1, request)
    if found >= 8:
        pytest.skip(f"{found} GPUs found: ranks need not share them")
    return 8
