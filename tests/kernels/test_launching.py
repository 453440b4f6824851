"""What native code passes to a kernel, held against Triton's PTX and launcher, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("launching_worker.py")


def test_launches_are_described_right(tmp_path: Path, torch: object) -> None:
    settings = {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": "cache"}
    done = subprocess.run(
        [sys.executable, WORKER], env=os.environ | settings,
        capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "right" in done.stdout, done.stdout + done.stderr
