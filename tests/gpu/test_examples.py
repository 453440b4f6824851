"""examples/ on two GPUs, started by torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def output_of(example: str, folder: Path, *arguments: str) -> str:
    """Run an example with a process on each of two GPUs; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         EXAMPLES / example, *arguments],
        cwd=folder, timeout=240, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_training(gpus: int, tmp_path: Path) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output_of("train.py", tmp_path))]
    assert len(losses) == 6 and losses[-1] < losses[0] / 4, losses


def test_embedding_tables(gpus: int, tmp_path: Path) -> None:
    said = output_of("dlrm.py", tmp_path)
    losses = re.findall(r"loss ([\d.]+), plain ([\d.]+)", said)
    assert len(losses) == 6 and float(losses[-1][0]) < 0.7 * float(losses[0][0]), said
    assert all(abs(float(own) - float(plain)) < 0.01 for own, plain in losses), said


def test_decoding_by_a_graph(gpus: int, tmp_path: Path) -> None:
    said = output_of("serve.py", tmp_path)
    way = r"^(eager|by a CUDA graph), on cuda: [\d.]+ ms a token, tokens (.*)$"
    ways = re.findall(way, said, re.MULTILINE)
    assert [how for how, _ in ways] == ["eager", "by a CUDA graph"], said
    assert ways[0][1] == ways[1][1], said


def test_a_llama(gpus: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    said = output_of("overlap_llama.py", tmp_path, "hetero_fused_1d")
    (losses,) = re.findall(r"loss without ficco ([\d.]+), with ficco ([\d.]+)", said)
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=1e-4), losses


def test_kernels_of_ones_own(gpus: int, tmp_path: Path) -> None:
    assert output_of("gemv_all_reduce.py", tmp_path).count("right, equal on all ranks") == 2
    assert "8 tables each, 1024 bags: right" in output_of("embedding_all_to_all.py", tmp_path)
