"""torch.distributed's single-tensor collectives, under the names of the installed PyTorch.

PyTorch 2.13 renames them and warns about the old names, which are the only ones in earlier
releases.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["all_gather", "reduce_scatter"]


def _named(*names: str) -> Any:
    """Return the first of these functions that torch.distributed has."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


all_gather = _named("all_gather_single", "all_gather_into_tensor")  # (whole, piece, group=None)
reduce_scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")  # (piece, whole, ...)
