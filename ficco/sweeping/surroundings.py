"""The surroundings of a measurement: processor, GPUs, versions, date. It does not import torch."""

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
    """Return machine, versions and date, which every result contains."""
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
    """Return nvidia-smi's description of the GPUs, and the versions of GPU packages."""
    versions = _versions("triton", "nvidia-nccl-cu13", "cuda-bindings")
    try:
        command = ["nvidia-smi", f"--query-gpu={','.join(_QUERIED)}", "--format=csv,noheader"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        rows = [[word.strip() for word in line.split(",")] for line in result.stdout.splitlines()]
        return {"gpus": [dict(zip(_QUERIED, row, strict=True)) for row in rows], "more": versions}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {"gpus": [], "gpus_missing": str(error), "more": versions}


def _versions(*packages: str) -> dict[str, str]:
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
