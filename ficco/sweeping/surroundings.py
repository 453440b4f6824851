"""Where a measurement ran: processor, GPUs, versions, the day. No torch here."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["gpus", "surroundings"]

_QUERIED = ("name", "driver_version", "power.limit", "clocks.max.sm")


def surroundings() -> dict[str, Any]:
    """Return machine, versions and date, as they stand in every result."""
    model = platform.processor() or "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "versions": {"python": platform.python_version(), **_versions("ficco", "numpy", "torch")},
    }


def gpus() -> dict[str, Any]:
    """Return what nvidia-smi says of the GPUs, and versions that matter there."""
    versions = _versions("triton", "nvidia-nccl-cu13", "cuda-bindings")
    try:
        command = ["nvidia-smi", f"--query-gpu={','.join(_QUERIED)}", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        rows = [[word.strip() for word in line.split(",")] for line in said.stdout.splitlines()]
        return {"gpus": [dict(zip(_QUERIED, row, strict=True)) for row in rows], "more": versions}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {"gpus": [], "gpus_missing": str(error), "more": versions}


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
