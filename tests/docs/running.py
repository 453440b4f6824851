"""Run the blocks of a page, in one process or in one per rank, and return what went wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

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
    done = subprocess.run(
        [sys.executable, RUNNER, page, "run"], cwd=folder, env=environment(), timeout=TIMEOUT_S,
        check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.stdout or "failed" if done.returncode else ""


def run_ranks(page: Path, folder: Path, how: str, world: int) -> str:
    """Run the blocks for several ranks, as torchrun would; return "" or the ranks' output."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    ranks = [
        subprocess.Popen(
            [sys.executable, RUNNER, page, how], cwd=folder,
            env=environment() | meet | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = [rank for rank, process in enumerate(ranks) if process.returncode]
    return "\n".join(f"rank {rank}:\n{said[rank]}" for rank in failed)
