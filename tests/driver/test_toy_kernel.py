"""A kernel that one record adds runs in programs, on the test double of the driver."""

from __future__ import annotations

from pathlib import Path

import pytest
from double_control import environment
from running_workers import run_worker

WORKER = Path(__file__).with_name("toy_on_double.py")


@pytest.mark.parametrize("world", [2, 3])
def test_programs_launch_it(double_folder: Path, world: int) -> None:
    run_worker(WORKER, "tiles", environment(double_folder, devices=4), {"world": world})
