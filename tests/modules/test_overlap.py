"""overlap() in processes: what ranks hold true is in the files overlap_*.py beside this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from one_run import OneRun
from ranks_of_torch import run

RUNS = (
    OneRun(
        "two ranks", "overlap_worker.py", 2,
        "forms", "guesses", "sharing", "apart", "checkpoints", "training", "options", "identity",
        "by_plan", "by_name", "copies", "deep", "megatron", "main_grads",
        "transformer_engine", "autotp", "refusals", "schedules",
        "not_shards", "half_way", "keeps_gather", "parametrized", "brought", "traced", "uneven",
        "disabled", "serving", "alone", "entries", "summed", "adapters", "shallow",
    ),
    OneRun(
        "compiled", "overlap_worker.py", 2,
        *[f"compiled_{kind}" for kind in ("models", "blocks", "shares", "by_plan", "modes")],
    ),
    OneRun(
        "four ranks", "overlap_worker.py", 4,
        "forms", "by_plan", "uneven", "main_grads", "autotp", "sharded", "sharded_by_plan",
        "not_shards",
    ),
    OneRun(
        "measures", "overlap_worker.py", 2,
        "measured", "measured_rank", "measured_forms", "measured_not",
    ),
    OneRun(
        "two ranks of torchtitan", "torchtitan_worker.py", 2,
        "trains", "compiled", "left", "without_tp", "claimed_twice", "options",
    ),
    OneRun("four ranks of torchtitan", "torchtitan_worker.py", 4, "trains"),
)  # fmt: skip


@pytest.mark.parametrize(("run", "check"), [test for run in RUNS for test in run.tests])
def test_what_ranks_check(
    run: OneRun, check: str, torch: Any, request: pytest.FixtureRequest
) -> None:
    """The checks of a run share one set of ranks; "end" is whether these ended well."""
    run.judge(check, request)


def test_a_first_call_measures_the_machine(tmp_path: Path, torch: Any) -> None:
    run("host_profile_worker.py", 2, tmp_path)


def test_a_large_model_is_wrapped_at_once(tmp_path: Path, torch: Any) -> None:
    run("overlap_meta_worker.py", 1, tmp_path)


@pytest.mark.parametrize(
    ("check", "ranks", "library", "needed"),
    [
        ("transformers", 2, "transformers", ("transformers", "accelerate")),
        ("transformers", 4, "transformers", ("transformers", "accelerate")),
        ("families", 2, "transformers", ("transformers", "accelerate")),
        ("experts", 2, "transformers", ("transformers", "accelerate")),
        ("peft", 2, "peft", ("transformers", "accelerate", "peft")),
        ("megatron", 2, "megatron", ("megatron.core",)),
        ("deepspeed", 2, "deepspeed", ("deepspeed",)),
        ("torchtitan spmd_types", 2, "torchtitan", ("torchtitan.trainer",)),
        ("torchtitan spmd_types", 4, "torchtitan", ("torchtitan.trainer",)),
        ("torchtitan context_parallel", 4, "torchtitan", ("torchtitan.trainer",)),
        ("torchtitan partial_dtensor", 2, "torchtitan", ("torchtitan.trainer",)),
        ("torchtitan partial_dtensor", 4, "torchtitan", ("torchtitan.trainer",)),
        ("torchtitan full_dtensor", 2, "torchtitan", ("torchtitan.trainer",)),
        ("torchtitan full_dtensor", 4, "torchtitan", ("torchtitan.trainer",)),
    ],
)
def test_other_libraries(
    check: str, ranks: int, library: str, needed: tuple[str, ...], tmp_path: Path, torch: Any,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Skipped where the library is missing; `--require LIBRARY` fails instead."""
    if library not in request.config.getoption("--require"):
        for name in needed:
            pytest.importorskip(name)
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    if (check, ranks) == ("torchtitan spmd_types", 4) and release < (2, 14):
        pytest.skip("FSDP of PyTorch 2.13 does not take the parameters of this backend")
    run("frameworks_worker.py", ranks, tmp_path, checks=check.split())
