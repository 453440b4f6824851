"""A profile of the host engine on this machine: all parts in turn, as the fields of a profile."""

from __future__ import annotations

import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import ficco
from ficco import oracle
from ficco.problem import DTYPES
from ficco.profiling.calling import call_us, probe
from ficco.profiling.host import compute, copies, words
from ficco.profiling.host.rig import Rig
from ficco.profiling.progress import Progress
from ficco.profiling.sources import source_line

__all__ = ["profile"]

_CALLS = 30
_PROBE_DTYPE = "float32"


def profile(world: int, name: str, progress: Progress) -> dict[str, Any]:
    """Measure the host engine with so many ranks; return a profile's fields.

    Args:
        world: number of ranks.
        name: of the machine.
        progress: is told of every part.
    """
    table: dict[str, Any] = {
        "name": name,
        "about": f"{world} ranks of the host engine on {os.cpu_count()} cores, as it was measured",
        "engine": "host",
        "devices": world,
        "device": _processor(),
        "source": source_line({"NumPy": np.__version__, "ml_dtypes": ml_dtypes.__version__}),
        "units": 1,
        "paced": False,
    }
    with progress.part("memory"):
        table["memory_gbps"] = compute.memory_gbps(world)
    with Rig(world) as rig:
        with progress.part("copies"):
            table["links"] = [copies.measure(rig)]
        with progress.part("words"):
            costs = words.measure(rig)
        with progress.part("GEMMs beside copies"):
            costs |= compute.step_costs(rig)
    table["costs"] = costs
    with progress.part("GEMMs"):
        table["gemms"] = {dtype: compute.gemm_points(world, dtype) for dtype in DTYPES}
    with progress.part("calls"):
        costs["call_us"] = call_us(_probed(world), world, _PROBE_DTYPE, table)
    return table


def _probed(world: int) -> float:
    """Return how long the probe lasts, from call to result, in us."""
    problem, schedule = probe(world, _PROBE_DTYPE)
    given = oracle.inputs(problem, 0)
    times = []
    with ficco.Node(world, machine="host") as node:
        for _ in range(_CALLS):
            begin = time.perf_counter()
            node.run(problem, given, schedule=schedule)
            times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times[_CALLS // 3 :])


def _processor() -> str:
    """Return the processor's name, as Linux knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
