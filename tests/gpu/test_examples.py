"""examples/ on two GPUs, started by torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LLAMA = ("overlap_llama.py", "hetero_fused_1d")
Programs = Callable[..., str]


def output_of(folder: Path, example: str, *arguments: str) -> str:
    """Run an example with a process on each of two GPUs; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         EXAMPLES / example, *arguments],
        cwd=folder, timeout=240, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def takes(*examples: str) -> pytest.MarkDecorator:
    """Mark a test with the examples that it takes."""
    return pytest.mark.programs(*((output_of, example) for example in examples))


@takes("train.py")
def test_training(programs: Programs) -> None:
    said = programs(output_of, "train.py")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) == 6 and losses[-1] < losses[0] / 4, losses


@takes("dlrm.py")
def test_embedding_tables(programs: Programs) -> None:
    said = programs(output_of, "dlrm.py")
    losses = re.findall(r"loss ([\d.]+), plain ([\d.]+)", said)
    assert len(losses) == 6 and float(losses[-1][0]) < 0.7 * float(losses[0][0]), said
    assert all(abs(float(own) - float(plain)) < 0.01 for own, plain in losses), said


@takes("serve.py")
def test_decoding_by_a_graph(programs: Programs) -> None:
    said = programs(output_of, "serve.py")
    way = r"^(eager|by a CUDA graph), on cuda: [\d.]+ ms a token, tokens (.*)$"
    ways = re.findall(way, said, re.MULTILINE)
    assert [how for how, _ in ways] == ["eager", "by a CUDA graph"], said
    assert ways[0][1] == ways[1][1], said


@pytest.mark.programs((output_of, *LLAMA))
def test_a_llama(programs: Programs) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    said = programs(output_of, *LLAMA)
    (losses,) = re.findall(r"loss without ficco ([\d.]+), with ficco ([\d.]+)", said)
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=1e-4), losses


@takes("gemv_all_reduce.py", "embedding_all_to_all.py")
def test_kernels_of_ones_own(programs: Programs) -> None:
    said = programs(output_of, "gemv_all_reduce.py")
    assert said.count("right, equal on all ranks") == 2, said
    said = programs(output_of, "embedding_all_to_all.py")
    assert "8 tables each, 1024 bags: right" in said, said
