"""Mixtures of experts by ficco: the whole layer, and its two calls with named schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from experts_compared.layer import Layer

__all__ = ["calls", "whole"]

Tensor = torch.Tensor
Way = Callable[..., Tensor]


def whole(limited: bool) -> Way:
    """Return ficco.moe as a function of operands, with a capacity if `limited`."""
    import ficco

    def run(layer: Layer, i: int, *operands: Any) -> Tensor:
        x, gates, w_in, w_out = operands
        capacity = layer.capacity if limited else None
        found: Tensor = ficco.moe(x, layer.ids[i], gates, w_in, w_out, capacity=capacity)
        return found

    return run


def calls(dispatch: str, combine: str) -> Way:
    """Return ficco's calls with two schedules as a function of operands."""
    import ficco

    def run(layer: Layer, i: int, *operands: Any) -> Tensor:
        x, gates, w_in, w_out = operands
        found: Tensor = ficco.moe(
            x, layer.ids[i], gates, w_in, w_out, capacity=layer.capacity,
            schedule=(dispatch, combine),
        )  # fmt: skip
        return found

    return run
