"""Mixtures of experts by ficco: the whole layer, and its two calls with named schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from experts_compared.layer import Layer
from ficco.api.moe import _Swiglu

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


def _activated(z: Tensor, routing: Any, room: int) -> Tensor:
    """Return the activations of rows times their gates, as ficco.moe makes them."""
    if z.is_cuda:
        fused: Any = _Swiglu.apply
        return fused(z, routing.gates, routing)  # type: ignore[no-any-return]
    gate, up = z.chunk(2, -1)
    h = torch.nn.functional.silu(gate) * up
    gated: Tensor = (h.float() * routing.row_gates(room).unsqueeze(-1)).to(h.dtype)
    return gated


def calls(dispatch: str, combine: str) -> Way:
    """Return ficco's calls with two schedules as a function of operands."""
    import ficco

    def run(layer: Layer, i: int, *operands: Any) -> Tensor:
        x, gates, w_in, w_out = operands
        room = layer.capacity
        routing = ficco.route(layer.ids[i], layer.experts, gates=gates, capacity=room)
        z = ficco.dispatch_matmul(x, routing, w_in, capacity=room, schedule=dispatch)
        h = _activated(z, routing, room)
        found: Tensor = ficco.matmul_combine(h, routing, w_out, schedule=combine)
        return found

    return run
