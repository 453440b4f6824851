"""Each example runs in two processes: one by torchrun, the others by what torchrun sets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from forking import run_forked, run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    "FICCO_MEASURE": "0", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


DLRM_LOSSES = r"loss ([\d.]+), plain ([\d.]+)"


def output_of(example: str, folder: Path, *arguments: str, **settings: str) -> str:
    """Run an example in two processes that have PyTorch imported; return what rank 0 prints.

    The settings are variables of the environment.
    """
    given = {**ENVIRONMENT, **settings}
    return run_ranks(
        2, EXAMPLES / example, *arguments, folder=folder, environment=given, timeout=120
    )[0]


def test_the_training_example(tmp_path: Path, torch: Any) -> None:
    import torch.distributed.run

    code, said = run_forked(
        Path(torch.distributed.run.__file__), "--standalone", "--nproc-per-node", 2,
        EXAMPLES / "train.py", folder=tmp_path, environment=ENVIRONMENT, timeout=120,
    )  # fmt: skip
    assert code == 0, said
    assert "ficco runs 3 of 3 tensor-parallel layers: 3 serial" in said, said
    assert "3 could overlap, but nothing is known" in said and "FICCO_MEASURE=0" in said, said
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) == 6 and losses[-1] < losses[0] / 4, losses


def test_the_serving_example_without_gpus(tmp_path: Path, torch: Any) -> None:
    said = output_of("serve.py", tmp_path)
    assert "no CUDA graph: 2 GPUs are needed, 0 found" in said, said
    assert re.search(r"eager, on cpu: [\d.]+ ms a token, tokens \[\d+, ", said), said
    assert "{q, k, v}" in said and "ficco runs 6 of 6 tensor-parallel layers" in said, said


def test_the_example_of_embedding_tables(tmp_path: Path, torch: Any) -> None:
    said = output_of("dlrm.py", tmp_path)
    assert "tables by rank: [[4, 0, 3], [1, 2, 5, 6]]" in said, said
    losses = [(float(own), float(plain)) for own, plain in re.findall(DLRM_LOSSES, said)]
    assert len(losses) == 6 and losses[-1][0] < 0.7 * losses[0][0], losses
    assert all(own == pytest.approx(plain, abs=1e-3) for own, plain in losses), losses
    (gap,) = re.findall(r"entry of a table: (\S+)", said)
    assert float(gap) < 1e-4, said


def test_the_example_of_experts(tmp_path: Path, torch: Any) -> None:
    said = output_of("moe.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) == 6 and losses[-1] < losses[0] / 4, losses
    (gap,) = re.findall(r"all experts on one rank: (\S+)", said)
    assert float(gap) < 1e-4, said


def test_the_llama_example(tmp_path: Path, torch: Any, request: pytest.FixtureRequest) -> None:
    """Skipped where transformers is missing; `--require transformers` fails instead."""
    if "transformers" not in request.config.getoption("--require"):
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    said = output_of("overlap_llama.py", tmp_path, "hetero_fused_1d")
    assert "ficco overlaps 15 of 15 tensor-parallel layers" in said, said
    (losses,) = re.findall(r"loss without ficco ([\d.]+), with ficco ([\d.]+)", said)
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=2e-5), losses


def test_the_examples_of_kernels(tmp_path: Path, torch: Any) -> None:
    said = output_of("gemv_all_reduce.py", tmp_path, TRITON_INTERPRET="1")
    assert said.count("right, equal on all ranks") == 2, said
    said = output_of("embedding_all_to_all.py", tmp_path, TRITON_INTERPRET="1")
    assert "2 ranks, 2 tables each, 5 bags: right" in said, said


def alone(example: str, folder: Path, *arguments: Any) -> str:
    """Run an example in one process; return what it prints."""
    code, said = run_forked(
        EXAMPLES / example, *arguments, folder=folder, environment=ENVIRONMENT, timeout=120
    )
    assert code == 0, said
    return said


def test_the_example_of_arrays(tmp_path: Path) -> None:
    said = alone("node_numpy.py", tmp_path)
    assert re.search(r"serial +[\d.]+ ms\n(.*\n)*hetero_fused_1d +[\d.]+ ms", said), said
    assert len(re.findall(r"rank 0 push\.\w+: 81920 bytes", said)) == 3, said


def test_the_example_of_schedules(tmp_path: Path) -> None:
    said = alone("write_a_schedule.py", tmp_path)
    assert said.count(": right: all_gather_matmul, 4 ranks") == 4, said
    timed = re.findall(r"^(\w+) +[\d.]+ ms$", said, re.M)
    assert timed == ["serial", "plain", "short_last", "short_last_8"], said


def test_the_example_of_a_sweep(tmp_path: Path) -> None:
    arguments = ("out", "--m", 64, "--n", 32, "--k", 64, "--rounds", 1, "--grains", 2)
    said = alone("sweep_my_node.py", tmp_path, *arguments)
    assert "12 of 12 points measured" in said, said
    assert re.search(r"^matmul_reduce_scatter 64 x 32 x 64, \w+: \w+ \d", said, re.M), said
    assert (tmp_path / "out" / "sweep" / "book.toml").exists()
