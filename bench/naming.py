"""Names of the machines that results were measured on: "h200x4", and 4 NVIDIA H200s in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["MACHINES", "machine_name", "where"]

# Whose results README shows: the most GPUs first.
MACHINES = ("h200x8", "h100x8", "h200x4", "h100x4", "h200x2", "h100x2")


def machine_name(document: Mapping[str, Any]) -> str:
    """Return by which name results are kept: of 4 "NVIDIA H100 80GB HBM3" "h100x4".

    Args:
        document: a result, with its `gpus` and its `world`.
    """
    kind = _kind(document)
    return f"{kind.split()[-1].lower() if kind else 'host'}x{document['world']}"


def where(document: Mapping[str, Any]) -> str:
    """Return the same in words: "4 NVIDIA H100s"."""
    return f"{document['world']} {_kind(document) or 'rank'}s"


def _kind(document: Mapping[str, Any]) -> str:
    """Return what the GPUs are called, without their memory; nothing where there are none."""
    names = [gpu["name"] for gpu in document.get("gpus") or ()]
    return " ".join(names[0].split()[:2]) if names else ""
