"""Every operator on GPUs, in every schedule and dtype, against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpus import right


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_every_operator_is_right(world: int, gpus: int, tmp_path: Path) -> None:
    if world > gpus:
        pytest.skip(f"{gpus} GPUs found, {world} are needed")
    right("operators", world, tmp_path, seeds=1)
