"""overlap() in processes: what ranks hold true is in the files overlap_*.py beside this."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from forking import run_forked
from ranks_of_torch import run

EXAMPLE = Path(__file__).parents[1] / "examples" / "train.py"


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


def test_the_example_trains(tmp_path: Path, torch: Any) -> None:
    import torch.distributed.run

    code, said = run_forked(
        Path(torch.distributed.run.__file__), "--standalone", "--nproc-per-node", 2, EXAMPLE,
        folder=tmp_path, environment={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        timeout=120,
    )  # fmt: skip
    assert code == 0, said
    assert "ficco runs 3 of 3 tensor-parallel layers: 3 serial" in said, said
    assert "3 could overlap, but nothing is known" in said and "FICCO_MEASURE=0" in said, said
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) == 6 and losses[-1] < losses[0] / 4, losses


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
