"""The Triton kernels on the CPU, under Triton's interpreter, in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from forking import run_forked

WORKER = Path(__file__).with_name("sums_and_products_worker.py")


@pytest.mark.parametrize("subject", ["summing", "products", "exactly"])
def test_a_kernel_is_right(subject: str, tmp_path: Path, torch: object) -> None:
    code, said = run_forked(
        WORKER, subject, folder=tmp_path, environment={"TRITON_INTERPRET": "1"}, timeout=200
    )
    assert code == 0 and "right" in said, said
