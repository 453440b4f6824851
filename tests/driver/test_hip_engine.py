"""The engine for AMD's devices, with all ranks in one process, on the double of AMD's library.

What it computes is held against the oracle. What a device does by itself is not known here: waits
are the double's own, in place of the kernel, whose code is read in tests/kernels/test_amd_code.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from double_control import environment
from running_workers import run_worker

WORKER = Path(__file__).with_name("hip_engine_worker.py")


def on_double(folder: Path, scenario: str, double: dict[str, Any], **words: Any) -> str:
    given = environment(folder / "hip_double", **{"devices": 8, **double}) | {"FICCO_PROBES": "0"}
    return run_worker(WORKER, scenario, given, words)


@pytest.mark.parametrize(
    ("world", "dtype"),
    [*((world, "float32") for world in (1, 3, 8)), (3, "float16"), (3, "bfloat16")],
)
def test_every_operator_and_schedule_is_right(hip_folder: Path, world: int, dtype: str) -> None:
    assert "right" in on_double(hip_folder, "operators", {}, worlds=[world], dtypes=[dtype])


@pytest.mark.parametrize(
    "double",
    [{"queues": 2}, {"queues": 4}, {"stale": 1}, {"nocu": "blit"}, {"sync_locks": 1}],
    ids=lambda double: " ".join(f"{name} {value}" for name, value in double.items()),
)
def test_it_is_right_however_the_library_behaves(hip_folder: Path, double: dict[str, Any]) -> None:
    """Few hardware queues, caches that keep old bytes, copies by kernels, calls that block."""
    said = on_double(hip_folder, "operators", double, worlds=[3], dtypes=["float16"])
    assert "right" in said


@pytest.mark.parametrize("name", ["hetero_fused_1d", "gated_1d"])
def test_a_late_rank_is_named_and_its_peers_are_released(hip_folder: Path, name: str) -> None:
    assert "right" in on_double(hip_folder, "late", {}, world=3, name=name)


def test_a_gated_gather_is_a_launch_of_the_package_s_kernel(hip_folder: Path) -> None:
    assert "right" in on_double(hip_folder, "gated", {"stale": 1}, world=3)


def test_graphs_replay_gated_gathers(hip_folder: Path) -> None:
    assert "right" in on_double(hip_folder, "replayed", {"stale": 1}, world=3)


def test_a_chunk_that_does_not_come_is_named(hip_folder: Path) -> None:
    assert "right" in on_double(hip_folder, "missing", {}, world=3)


def test_copies_that_write_nothing_are_found(hip_folder: Path) -> None:
    assert "right" in on_double(hip_folder, "dropped", {"nocu": "dropped"}, world=2)


@pytest.mark.parametrize("copies", ["done", "dropped"])
def test_doctor_looks_at_devices_and_signals(hip_folder: Path, copies: str) -> None:
    double = {"devices": 2, "nocu": copies}
    found = on_double(hip_folder, "doctor", double, signals=copies == "done")
    assert "right" in found
