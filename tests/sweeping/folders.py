"""Grids for tests, sweeps as a person starts them, and what their folders hold."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# 3 operators x 5 shapes x 14 schedules: some 200 points that last less than a millisecond each.
MANY = """
machine = "host"
ranks = 2
rounds = 3

[[cases]]
op = ["all_gather_matmul", "matmul_reduce_scatter", "embedding_all_to_all"]
shapes = [[13, 5, 7], [8, 6, 9], [21, 4, 3], [5, 3, 17], [16, 8, 8]]
grains = [1, 3]
schedules = [
  "shard_p2p", "uniform_fused_1d", "hetero_fused_1d", "hetero_unfused_1d", "gated_1d",
  "uniform_fused_2d", { name = "hetero_fused_1d", taper = "tail" },
  { name = "hetero_unfused_1d", route = "rotation" },
]
"""
SIMULATED = """
how = "simulated"
machine = "mesh4"

[[cases]]
op = ["all_gather_matmul", "matmul_all_reduce"]
shapes = [[67, 29, 31], [40, 12, 500]]
regimes = ["captured", "eager"]
grains = [1, 4]
"""
PACED = """
machine = "mesh4"
ranks = 3
rounds = 3

[[cases]]
op = "all_gather_matmul"
shapes = [[31, 29, 17], [64, 16, 24]]
grains = [2]
schedules = ["hetero_fused_1d", "gated_1d", "auto"]
"""


def write(folder: Path, text: str, name: str = "grid.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from ficco.__main__ import main
sys.exit(main())
"""


def start(*args: str | Path, report: bool = False) -> subprocess.Popen[str]:
    """Start `ficco sweep` as a process of its own, which Ctrl-C interrupts.

    A process inherits that a signal is ignored: a shell's background ignores SIGINT.
    """
    command = [sys.executable, "-c", INTERRUPTIBLE, "sweep", *map(str, args)]
    command += [] if report else ["--no-report"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
    )


def grown(process: subprocess.Popen[str], journal: Path, size: int) -> bool:
    """Wait until a journal has so many bytes; return whether its process still runs."""
    limit = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < limit:
        if journal.exists() and journal.stat().st_size >= size:
            return True
        time.sleep(0.001)
    return False


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outline(folder: Path) -> list[tuple[Any, ...]]:
    """Return results without what is measured; which point is the best is measured, too."""
    fields = ("kind", "shape", "regime", "id", "name", "grain", "runs", "screened", "reason", "ok")
    found = []
    for line in lines(folder / "results.jsonl"):
        if line["kind"] == "timeline":
            found.append(("timeline", line["shape"], line["regime"], line["which"]))
        else:
            found.append(tuple(line.get(field) for field in fields))
    return found
