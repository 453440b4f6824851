"""Run the blocks of a page, in one process or in one per rank, and return what went wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from forking import Forked, ended, run_forked

__all__ = ["run_alone", "run_ranks"]

RUNNER = Path(__file__).with_name("page_runner.py")
TIMEOUT_S = 120


def environment() -> dict[str, str]:
    """Return the environment of a process: commands of this Python, and no machine is measured."""
    scripts = str(Path(sys.executable).parent)
    path = os.pathsep.join([scripts, os.environ["PATH"]])
    return os.environ | {"PATH": path, "FICCO_MEASURE": "0", "PYTHONSAFEPATH": "1"}


def run_alone(page: Path, folder: Path) -> str:
    """Run the blocks for one process in a folder; return "" or the output of the failure."""
    code, said = run_forked(
        RUNNER, page, "run", folder=folder, environment=environment(), timeout=TIMEOUT_S
    )
    return said or "failed" if code else ""


def run_ranks(page: Path, folder: Path, how: str, world: int) -> str:
    """Run the blocks for several ranks, as torchrun would; return "" or the ranks' output."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    logs = [(folder / f"rank{rank}.txt").open("w+") for rank in range(world)]
    given = [
        environment() | meet | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)
    ]
    ranks = [_started([RUNNER, page, how], folder, *each) for each in zip(given, logs, strict=True)]
    codes = ended(ranks, TIMEOUT_S)
    said = [(folder / f"rank{rank}.txt").read_text() for rank in range(world)]
    for log in logs:
        log.close()
    if codes == [0] * world:
        return ""
    return "\n".join(f"rank {i}: {codes[i]}\n{said[i]}" for i in range(world))


def _started(words: list[object], folder: Path, given: dict[str, str], log: IO[str]) -> Any:
    """Start a rank: forked with PyTorch imported, or, for GPUs, a Python of its own."""
    if "gpu" not in words:
        return Forked(words, log, subprocess.STDOUT, given, folder)
    command = [sys.executable, *[str(word) for word in words]]
    return subprocess.Popen(
        command, cwd=folder, env=given, stdout=log, stderr=subprocess.STDOUT, text=True
    )
