"""Bags of a table pooled by PyTorch, with float32 sums."""

from __future__ import annotations

import torch

__all__ = ["pooled_bags"]


def pooled_bags(
    table: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None = None,
    mean: bool = False,
) -> torch.Tensor:
    """Return the sums or means of all bags, in float32 or rounded once to the table's dtype.

    See `Compute.bag`.
    """
    if weights is not None and table.dtype != torch.float32:
        # PyTorch takes weights in the dtype of the rows alone.
        table = table.index_select(0, indices).float()
        indices = torch.arange(len(indices), device=indices.device, dtype=indices.dtype)
    elif not table.is_cuda:  # GPUs add up in float32
        table = table.float()
    pooled: torch.Tensor = torch.nn.functional.embedding_bag(
        indices, table, offsets, mode="mean" if mean else "sum", per_sample_weights=weights
    )
    return pooled
