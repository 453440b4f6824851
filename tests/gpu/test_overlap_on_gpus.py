"""Overlapped models on GPUs: what they compute, what it takes, a step as one CUDA graph."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpus import right

WORKER = Path(__file__).with_name("overlap_worker.py")


@pytest.mark.parametrize("world", [2, 4])
def test_models_compute_what_they_did(world: int, gpus: int, tmp_path: Path) -> None:
    if world > gpus:
        pytest.skip(f"{gpus} GPUs found, {world} are needed")
    right("models", world, tmp_path, worker=WORKER)


def test_a_captured_step_trains(gpus: int, tmp_path: Path) -> None:
    right("captured", 2, tmp_path, worker=WORKER)


def test_explain_measures(gpus: int, tmp_path: Path) -> None:
    right("measured", 2, tmp_path, worker=WORKER)


def test_models_of_shards_compute_what_the_whole_does(ranks: int, tmp_path: Path) -> None:
    right("shards", ranks, tmp_path, worker=WORKER)
