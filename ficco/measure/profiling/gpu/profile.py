"""Measurement of a profile of this machine's GPUs, part by part."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import ficco
from ficco.engine import cuda
from ficco.measure.profiling import Progress
from ficco.measure.profiling.entry_costs import call_us
from ficco.measure.profiling.figures import slug
from ficco.measure.profiling.gpu import calls, driver, gemms, transfers
from ficco.measure.profiling.gpu.ranks import Ranks, RecvBuffer
from ficco.measure.profiling.writing import source_line

_PATIENCE_S = 20.0  # timeout of ficco's calls


def profile(ranks: Ranks, progress: Progress) -> dict[str, Any]:
    """Measure everything; return a profile's fields, equal on all ranks.

    Raises:
        EngineError: a driver call failed, or cuda-bindings is missing.
    """
    table = _about(ranks)
    with _part(ranks, progress, "memory"):
        table["memory_gbps"] = gemms.memory_gbps(ranks)
    with _part(ranks, progress, "links"):
        recv = RecvBuffer(ranks)
        table["links"] = [transfers.link(ranks, recv)]
    with _part(ranks, progress, "signals"):
        costs = transfers.signal_costs(ranks, recv)
    with _part(ranks, progress, "collectives"):
        table["collectives"] = transfers.collective_times(ranks)
    with _part(ranks, progress, "GEMM beside transfers"):
        costs |= gemms.worst(gemms.contention(ranks, recv))
    with _part(ranks, progress, "GEMMs in pieces"):
        table["pieces"] = gemms.piece_ratios(ranks)
    table["gemms"] = {}
    for dtype in ("bfloat16", "float32"):
        with _part(ranks, progress, f"GEMMs of {dtype}"):
            points, left = gemms.gemm_points(ranks, dtype)
            table["gemms"][dtype] = points
        if left:
            progress.say(f"GEMMs of {dtype}: time is up, {left} of {len(points) + left} left out")
    with _part(ranks, progress, "gated GEMMs"):
        costs["gated_gemm"] = gemms.gated_ratio(ranks)
    ficco.prepare(machine="cuda", timeout_s=_PATIENCE_S)
    with _part(ranks, progress, "host"):
        costs |= calls.host_costs(ranks)
    with _part(ranks, progress, "launches and calls"):
        costs["launch_us"] = calls.launch_us(ranks, costs["wait_us"])
        table["costs"] = costs
        probed = calls.probe_us(ranks)
        costs["call_us"] = call_us(probed, ranks.world, calls.DTYPE, table)
    with _part(ranks, progress, "stores at peers"):
        costs |= calls.store_costs(
            ranks, costs["launch_us"], max(rate for _, rate in table["links"][0]["gbps"])
        )
    ficco.close()
    return table


@contextmanager
def _part(ranks: Ranks, progress: Progress, name: str) -> Iterator[None]:
    """Run a part: report it when it is done; the watchdog ends a part that hangs."""
    ranks.beat()
    with progress.part(name):
        yield
    torch.cuda.empty_cache()


def _about(ranks: Ranks) -> dict[str, Any]:
    device = torch.cuda.get_device_name(ranks.device)
    nccl: Any = torch.cuda.nccl
    versions = {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "",
        "driver": ranks.gather(_driver_version() if ranks.rank == 0 else "")[0],
        "NCCL": ".".join(map(str, nccl.version())),
    }
    return {
        "name": f"{slug(device)}x{ranks.world}",
        "about": f"{ranks.world} x {device} of one node, as they were measured",
        "engine": "cuda",
        "devices": ranks.world,
        "device": device,
        "source": source_line(versions),
        "signals": driver.kind_of_signals(),
        "units": torch.cuda.get_device_properties(ranks.device).multi_processor_count,
    }


def _driver_version() -> str:
    """Return the driver's version from nvidia-smi, or the driver's CUDA version."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return result.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return f"of CUDA {cuda.served_version()}"
