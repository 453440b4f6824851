"""Mixtures of experts by ficco: the whole layer, with or without a capacity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from experts_compared.layer import Layer

__all__ = ["way"]

Tensor = torch.Tensor


def way(limited: bool, schedule: str | tuple[str, str] = "auto") -> Callable[..., Tensor]:
    """Return ficco.moe as a function of a layer, the number of its routing, and operands.

    Args:
        limited: whether to pass a capacity.
        schedule: of the call, or of its dispatch and its combine.
    """
    import ficco

    def run(layer: Layer, i: int, *operands: Any) -> Tensor:
        x, gates, w_in, w_out = operands
        capacity = layer.capacity if limited else None
        found: Tensor = ficco.moe(
            x, layer.ids[i], gates, w_in, w_out, capacity=capacity, schedule=schedule
        )
        return found

    return run
