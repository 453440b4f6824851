"""Kernels of the pack, without Triton, on the test double of the driver; see packed_worker.py."""

from __future__ import annotations

from pathlib import Path

from double_control import environment
from forking import run_forked

WORKER = Path(__file__).with_name("packed_worker.py")


def test_kernels_of_the_pack_need_no_triton(
    double_folder: Path, tmp_path: Path, torch: object
) -> None:
    scenarios = ["gated", "sums", "described", "lacking"]
    given = environment(double_folder, devices=1)
    code, said = run_forked(
        WORKER, *scenarios, folder=tmp_path, environment=given, timeout=100, kind="torch"
    )
    right = [f"{scenario} right" for scenario in scenarios]
    assert code == 0 and said.splitlines()[-4:] == right, said[-4000:]
