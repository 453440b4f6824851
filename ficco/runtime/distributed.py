"""Collectives of torch.distributed under one name in all releases, and for uneven rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["all_gather", "exchange", "gathered", "reduce_scatter"]


def _named(*names: str) -> Any:
    """Return the first of these functions that torch.distributed has.

    PyTorch 2.13 renames collectives of one tensor and warns about the old names, which are the only
    ones in earlier releases.
    """
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


all_gather = _named("all_gather_single", "all_gather_into_tensor")  # (whole, piece, group=None)
reduce_scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")  # (piece, whole, ...)


def gathered(own: torch.Tensor, rows: Sequence[int], group: Any) -> torch.Tensor:
    """Return the rows of all ranks; `rows` is the number per rank. Uneven rows are padded."""
    if not own.is_cuda or len(set(rows)) > 1:
        return torch.cat(_gather(own, rows, group))
    whole = own.new_empty((sum(rows), own.shape[1]))
    all_gather(whole, own.contiguous(), group=group)
    return whole


def _gather(own: torch.Tensor, rows: Sequence[int], group: Any) -> list[torch.Tensor]:
    padded = own.new_zeros((max(rows), own.shape[1]))
    padded[: own.shape[0]] = own
    pieces = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(pieces, padded, group=group)
    return [piece[:count] for piece, count in zip(pieces, rows, strict=True)]


def exchange(
    own: torch.Tensor, splits: Sequence[Sequence[int]], group: Any, rank: int
) -> torch.Tensor:
    """Send splits[rank][r] rows to every rank r; return the received rows by source rank."""
    sizes_in = [row[rank] for row in splits]
    target = own.new_empty((sum(sizes_in), own.shape[1]))
    dist.all_to_all_single(target, own.contiguous(), sizes_in, list(splits[rank]), group=group)
    return target
