"""Starts a process per GPU that runs one scenario of worker.py, and never leaves one behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")


def run(
    scenario: str,
    world: int,
    folder: Path,
    *,
    worker: Path = WORKER,
    allowed_s: float = 240.0,
    environment: dict[str, str] | None = None,
    **words: Any,
) -> list[str]:
    """Run a worker's scenario; return what each rank said, with its status.

    Rank r is on GPU r or, where these are fewer, shares one: see `ficco.sweeping.gpu.joining`.
    """
    given = os.environ | {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    given |= environment or {}
    store = folder / "store"
    ranks = []
    said = [folder / f"rank{rank}.txt" for rank in range(world)]
    for rank in range(world):
        with said[rank].open("w") as log:
            command = [sys.executable, "-P", str(worker), scenario, str(store), str(rank)]
            ranks.append(
                subprocess.Popen(
                    [*command, str(world), json.dumps(words)], stdout=log,
                    stderr=subprocess.STDOUT, env=given, cwd=folder,
                )
            )  # fmt: skip
    try:
        for rank in ranks:
            rank.wait(allowed_s)
    except subprocess.TimeoutExpired:
        pass  # what it said tells more
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait(30)
    return [f"exit {r.returncode}\n{log.read_text()}" for r, log in zip(ranks, said, strict=True)]


def right(*args: Any, **words: Any) -> None:
    """Run a scenario that every rank must end well."""
    for rank, said in enumerate(run(*args, **words)):
        assert said.startswith("exit 0") and "right" in said, f"rank {rank}: {said[-4000:]}"
