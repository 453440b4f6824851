"""Kernels of the pack, without Triton, on the test double of the driver; see packed_worker.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from double_control import environment

WORKER = Path(__file__).with_name("packed_worker.py")


def test_kernels_of_the_pack_need_no_triton(double_folder: Path, torch: object) -> None:
    scenarios = ["gated", "sums", "described", "lacking"]
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(WORKER), *scenarios],
        env=environment(double_folder, devices=1),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    right = [f"{scenario} right" for scenario in scenarios]
    assert done.returncode == 0 and done.stdout.splitlines()[-4:] == right, done.stdout[-4000:]
