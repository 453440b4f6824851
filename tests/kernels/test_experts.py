"""Kernels of experts: under Triton's interpreter against float64, and compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from forking import run_forked

WORKER = Path(__file__).with_name("experts_worker.py")


@pytest.mark.parametrize(
    "subject",
    ["lists", "products", "waves", "returned", "gradients", "activation", "alone", "assembly"],
)
def test_experts(subject: str, tmp_path: Path, torch: object) -> None:
    interpret = "0" if subject == "assembly" else "1"
    settings = {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": "cache"}
    code, said = run_forked(WORKER, subject, folder=tmp_path, environment=settings, timeout=200)
    assert code == 0 and "right" in said, said
