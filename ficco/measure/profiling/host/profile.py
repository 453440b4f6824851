"""Measurement of a profile of the host engine on this machine, part by part."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from ficco.core.dtypes import DTYPES
from ficco.core.errors import counted
from ficco.measure.profiling import Progress
from ficco.measure.profiling.entry_costs import call_us, probe
from ficco.measure.profiling.host import parts
from ficco.measure.profiling.host.rig import Rig
from ficco.measure.profiling.writing import source_line

_PROBE_DTYPE = "float32"


def profile(rig: Rig, name: str, progress: Progress) -> dict[str, Any]:
    """Measure the host engine with a rig's ranks; return a profile's fields.

    Args:
        rig: the ranks. If they are processes, all of them call this and get equal results.
        name: the machine's name.
        progress: receives every part.
    """
    table: dict[str, Any] = {
        "name": name,
        "about": f"{rig.world} ranks of the host engine ({rig.kind}) on "
        f"{counted(rig.cores, 'core')}, as it was measured",
        "engine": "host",
        "devices": rig.world,
        "device": processor(),
        "source": source_line({rig.compute.name: _version(rig.compute.name)}),
        "units": 1,
        "cores": rig.cores,
        "paced": False,
    }
    with progress.part("memory"):
        table["memory_gbps"] = parts.memory_gbps(rig)
    with progress.part("copies"):
        table["links"] = [parts.link(rig)]
    with progress.part("signals"):
        costs = parts.signal_costs(rig)
    with progress.part("GEMMs beside copies"):
        costs |= parts.step_costs(rig)
    table["costs"] = costs
    with progress.part("GEMMs"):
        table["gemms"] = {dtype: parts.gemm_points(rig, dtype) for dtype in DTYPES}
    with progress.part("calls"):
        probe_time_us = rig.probe_us(*probe(rig.world, _PROBE_DTYPE))
        costs["call_us"] = call_us(probe_time_us, rig.world, _PROBE_DTYPE, table)
    return table


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def processor() -> str:
    """Return the processor's name from /proc/cpuinfo, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
