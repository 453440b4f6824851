"""The Triton kernels on the CPU, under Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("worker.py")


@pytest.mark.parametrize("subject", ["summing", "pooling"])
def test_a_kernel_is_right(subject: str, tmp_path: Path, torch: object) -> None:
    done = subprocess.run(
        [sys.executable, WORKER, subject],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, cwd=tmp_path, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "right" in done.stdout, done.stdout + done.stderr
