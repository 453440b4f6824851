"""Names of the machines of results: "h200x4", or "4 NVIDIA H200s" in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ficco.measure.profiling.figures import model, slug

__all__ = ["MACHINES", "SHARED", "machine_name", "where"]

# Machines whose results the pages show, the most GPUs first.
MACHINES = ("h200x8", "h100x8", "h200x4", "h100x4", "h200x2", "h100x2")
SHARED = ("h200x2_by_8", "h100x2_by_8")  # ranks that share GPUs


def machine_name(document: Mapping[str, Any]) -> str:
    """Return the machine's name in names of results, which is that of a profile: "h100x4".

    Args:
        document: a result, with its `gpus` and `world`; if ranks share GPUs, `shared_gpus` has the
            number of GPUs, and the name is like "h100x2_by_8".
    """
    device, world = _device(document), document["world"]
    name = slug(device) if device else "host"
    if shared := document.get("shared_gpus"):
        return f"{name}x{shared}_by_{world}"
    return f"{name}x{world}"


def where(document: Mapping[str, Any]) -> str:
    """Return the machine in words: "4 NVIDIA H100s"."""
    devices = f"{model(_device(document)) or 'rank'}s"
    if shared := document.get("shared_gpus"):
        return f"{document['world']} ranks that share {shared} {devices}"
    return f"{document['world']} {devices}"


def _device(document: Mapping[str, Any]) -> str:
    return next((str(gpu["name"]) for gpu in document.get("gpus") or ()), "")
