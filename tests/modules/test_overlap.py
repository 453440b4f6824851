"""overlap() in processes: what ranks hold true is in the files overlap_*.py beside this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks_of_torch import run


def test_models_compute_what_they_did(tmp_path: Path, torch: Any) -> None:
    """Many checks in one set of processes: to start them takes longer than most."""
    results = ("forms", "guesses", "sharing", "apart", "checkpoints", "training")
    limits = (
        "options",
        "identity",
        "by_plan",
        "by_name",
        "copies",
        "deep",
        "megatron",
        "refusals",
        "schedules",
        "not_shards",
        "half_way",
        "keeps_gather",
        "parametrized",
        "brought",
        "traced",
        "uneven",
    )
    checks = (*results, *limits, "disabled", "serving", "alone")
    run("overlap_worker.py", 2, tmp_path, checks=checks)


def test_compiled_models(tmp_path: Path, torch: Any) -> None:
    kinds = ("models", "blocks", "shares", "by_plan", "modes")
    run("overlap_worker.py", 2, tmp_path, checks=tuple(f"compiled_{kind}" for kind in kinds))


def test_four_ranks_and_two_by_two(tmp_path: Path, torch: Any) -> None:
    checks = ("forms", "by_plan", "uneven", "sharded", "sharded_by_plan", "not_shards")
    run("overlap_worker.py", 4, tmp_path, checks=checks)


def test_explain_measures(tmp_path: Path, torch: Any) -> None:
    checks = ("measured", "measured_rank", "measured_forms", "measured_not")
    run("overlap_worker.py", 2, tmp_path, checks=checks)


def test_a_first_call_measures_the_machine(tmp_path: Path, torch: Any) -> None:
    run("host_profile_worker.py", 2, tmp_path)


def test_a_large_model_is_wrapped_at_once(tmp_path: Path, torch: Any) -> None:
    run("overlap_meta_worker.py", 1, tmp_path)


@pytest.mark.parametrize(
    ("library", "ranks"), [("transformers", 2), ("transformers", 4), ("megatron", 2)]
)
def test_other_libraries(
    library: str, ranks: int, tmp_path: Path, torch: Any, request: pytest.FixtureRequest
) -> None:
    """Skipped where the library is missing; `--require LIBRARY` fails instead."""
    needed = {"transformers": ("transformers", "accelerate"), "megatron": ("megatron.core",)}
    if library not in request.config.getoption("--require"):
        for name in needed[library]:
            pytest.importorskip(name)
    run("frameworks_worker.py", ranks, tmp_path, checks=(library,))
