"""The module for a vendor's devices, by the name of the engine."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["vendor_of"]


def vendor_of(engine: str) -> Any:
    """Return `ficco.engines.cuda` for "cuda", `ficco.engines.hip` for "hip"."""
    return importlib.import_module(f"ficco.engines.{engine}")
