"""Names of the machines that results were measured on: "h200x4", and 4 NVIDIA H200s in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ficco.profiling.figures import model, slug

__all__ = ["MACHINES", "machine_name", "where"]

# Whose results README shows: the most GPUs first.
MACHINES = ("h200x8", "h100x8", "h200x4", "h100x4", "h200x2", "h100x2")


def machine_name(document: Mapping[str, Any]) -> str:
    """Return by which name results are kept, which is that of a profile: "h100x4".

    Args:
        document: a result, with its `gpus` and its `world`.
    """
    device = _device(document)
    return f"{slug(device) if device else 'host'}x{document['world']}"


def where(document: Mapping[str, Any]) -> str:
    """Return the same in words: "4 NVIDIA H100s"."""
    return f"{document['world']} {model(_device(document)) or 'rank'}s"


def _device(document: Mapping[str, Any]) -> str:
    return next((str(gpu["name"]) for gpu in document.get("gpus") or ()), "")
