"""What all tests share: hypothesis profiles, and the --require option."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Helper modules of the tests lie beside them; --import-mode=importlib does not look there.
for folder in ("plan", "host", "report", "sweeping"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

settings.register_profile(
    "ficco", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ficco")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require", action="append", default=[], metavar="WHAT",
        help="fail instead of skipping where WHAT (torch, transformers, megatron, chromium) is "
        "missing",
    )  # fmt: skip
    parser.addoption(
        "--calls", type=int, default=300, help="calls per operator of the fuzz tests (%(default)s)"
    )


@pytest.fixture
def torch(request: pytest.FixtureRequest):
    """PyTorch, or a skip; with --require torch a failure."""
    if "torch" in request.config.getoption("--require"):
        import torch

        return torch
    return pytest.importorskip("torch")
