"""ficco's functions on torch tensors, in processes.

What each rank checks is in values_worker.py; of gradients in gradient_worker.py; of torch.compile
and its like in tracing_worker.py; of gradients of inputs and weights apart in halves_worker.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks_of_torch import run


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_function_and_gradient_is_right_in_every_rank(
    world: int, tmp_path: Path, torch: Any
) -> None:
    run("functions_worker.py", world, tmp_path, "cpu")


@pytest.mark.parametrize("world", [2])
def test_compilers_checkpoints_and_modes(world: int, tmp_path: Path, torch: Any) -> None:
    run("tracing_worker.py", world, tmp_path)


def test_gradients_by_halves_and_in_zero_bubble_pipelines(tmp_path: Path, torch: Any) -> None:
    run("halves_worker.py", 4, tmp_path, "cpu")
