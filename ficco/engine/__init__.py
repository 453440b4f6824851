"""Engines run the programs of ranks, on the host and on GPUs."""

from __future__ import annotations

import importlib
from typing import Any


def vendor_of(engine: str) -> Any:
    """Return `ficco.engine.cuda` for "cuda", `ficco.engine.hip` for "hip"."""
    return importlib.import_module(f"ficco.engine.{engine}")
