"""ficco's functions on torch tensors, in processes.

What each rank holds true is in worker.py; of gradients in gradient_worker.py; of torch.compile and
its like in tracing_worker.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_function_and_gradient_is_right_in_every_rank(
    world: int, tmp_path: Path, torch: Any
) -> None:
    run("functions_worker.py", world, tmp_path, "cpu")


@pytest.mark.parametrize("world", [2])
def test_compilers_checkpoints_and_modes(world: int, tmp_path: Path, torch: Any) -> None:
    run("tracing_worker.py", world, tmp_path)


def run(worker: str, world: int, tmp_path: Path, *more: str) -> None:
    """Run a worker in a process per rank; each says that all was right."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, HERE / worker, *more, str(tmp_path / "store"), str(rank), str(world)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
            cwd=tmp_path,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, rank in enumerate(ranks):
        assert rank.returncode == 0 and "right" in said[number], f"rank {number}: {said[number]}"
