"""The products of experts alone, on rows that are permuted already; and the floor of a layer.

The floor adds the activation, and the sum of the slots of this rank's own tokens. Rows are those of
this rank in the i-th routing, so the slowest rank has the most rows.
"""

from __future__ import annotations

from typing import Any

import torch

from experts_compared import pieces
from experts_compared.by_nccl import gathered_places
from experts_compared.layer import Layer
from experts_compared.pieces import Places
from experts_compared.points import SETS

__all__ = ["Alone"]

Tensor = torch.Tensor


class Alone:
    """Rows by expert for each routing. Other routings do not change them."""

    def __init__(self, layer: Layer, summed: bool) -> None:
        self.summed, shape = summed, layer.shape
        about: dict[str, Any] = {"dtype": layer.x.dtype, "device": layer.x.device}
        self.ends, self.padded = [], []
        for number in range(SETS):
            ids = torch.cat([layer.routing(number, rank)[0] for rank in range(layer.world)])
            places, ends = gathered_places(layer, ids, layer.capacity)
            self.ends.append(ends)
            self.padded.append(places)
        self.counts = [int(ends[-1]) for ends in self.ends]
        self.rows = torch.randn(layer.capacity, shape.d, **about)
        self.hidden = torch.randn(layer.capacity, shape.f, **about)
        tokens, topk = layer.ids[0].shape
        slots = torch.randperm(tokens * topk, device=layer.x.device)
        self.places = Places(slots // topk, slots, pieces.inverse(slots).view(-1, topk))
        self.returned = torch.randn(len(slots), shape.d, **about)

    def __call__(self, layer: Layer, i: int, *operands: Any) -> Tensor:
        """Run the i-th call."""
        _, gates, w_in, w_out = operands
        ops: Any = torch
        count, ends = max(self.counts[i], 1), self.ends[i]
        z = ops._grouped_mm(self.rows[:count], w_in, offs=ends)
        h = pieces.activation(z, ends) if self.summed else self.hidden[:count]
        y: Tensor = ops._grouped_mm(h, w_out, offs=ends)
        return pieces.Sums.run(self.returned, self.places, gates) if self.summed else y
