"""torch.distributed's collectives over one tensor, by the names that this PyTorch has for them.

PyTorch 2.13 calls them otherwise, and warns of the names that earlier ones have alone.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["all_gather", "reduce_scatter"]


def _named(*names: str) -> Any:
    """Return the first of these that there is."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


all_gather = _named("all_gather_single", "all_gather_into_tensor")  # (whole, piece, group=None)
reduce_scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")  # (piece, whole, ...)
