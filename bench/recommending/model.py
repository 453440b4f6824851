"""The dense part of a DLRM, of which every rank has a copy, and its training step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from recommending.shapes import DENSE, Batch, Shape
from recommending.ways import Way

__all__ = ["Mlps", "infer", "train"]

Tensor = torch.Tensor


def _layers(widths: Sequence[int]) -> Iterator[nn.Module]:
    for number, (fan_in, fan_out) in enumerate(pairwise(widths)):
        if number:
            yield nn.ReLU()
        yield nn.Linear(fan_in, fan_out)


class Mlps(nn.Module):
    """Bottom MLP, products of all pairs of vectors, top MLP.

    Attributes:
        gradients: of all parameters, one behind another; parameters' gradients are its parts.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        self.vectors, self.dim = shape.tables + 1, shape.dim
        pairs = self.vectors * (self.vectors - 1) // 2
        self.bottom = nn.Sequential(*_layers((DENSE, *shape.bottom, shape.dim)))
        self.top = nn.Sequential(*_layers((shape.dim + pairs, *shape.top, 1)))
        self.to(device, getattr(torch, shape.dtype))
        row, column = torch.tril_indices(self.vectors, self.vectors, -1, device=device)
        self.pairs = row * self.vectors + column
        own = list(self.parameters())
        sizes = [p.numel() for p in own]
        self.gradients = own[0].new_zeros(sum(sizes))
        for parameter, part in zip(own, self.gradients.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    def score(self, dense: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """Return scores [b] from vectors [b, dim] and pooled tables, each [b, tables, dim]."""
        vectors = torch.cat([dense.unsqueeze(1), *blocks], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        interaction = products.index_select(1, self.pairs)
        return self.top(torch.cat([dense, interaction], dim=1)).squeeze(1)


def infer(mlps: Mlps, way: Way, batch: Batch) -> Tensor:
    """Return this rank's scores."""
    begun = way.begin()
    dense = mlps.bottom(batch.features)  # beside the exchange of pooled tables
    return mlps.score(dense, way.end(begun))


def train(mlps: Mlps, way: Way, batch: Batch, rate: float) -> Tensor:
    """Make a training step; return this rank's scores."""
    mlps.gradients.zero_()
    way.clear()
    scores = infer(mlps, way, batch)
    loss = nn.functional.binary_cross_entropy_with_logits(scores, batch.labels, reduction="sum")
    (loss / (len(scores) * way.world)).backward()
    dist.all_reduce(mlps.gradients)
    with torch.no_grad():
        for parameter in mlps.parameters():
            parameter.sub_(parameter.grad, alpha=rate)
    way.step()
    return scores.detach()
