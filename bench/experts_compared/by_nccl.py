"""Mixtures of experts by NCCL's collectives and PyTorch's permutes.

all_to_all    what torchtitan's dispatcher does by default: slots travel sorted by expert, the host
              reads how many, and arrivals are sorted by local expert once more.
all_gather    what vLLM does by default: all tokens go to all ranks, each rank takes the slots of
              its experts, and a reduce-scatter adds up the results.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from experts_compared import pieces
from experts_compared.layer import Layer
from experts_compared.pieces import Places

__all__ = ["all_gather", "all_to_all", "gathered_places"]

Tensor = torch.Tensor


def all_to_all(layer: Layer, i: int, *operands: Tensor) -> Tensor:
    """Return the result of the i-th call."""
    x, gates, w_in, w_out = operands
    world, e, topk = layer.world, layer.e, layer.shape.topk
    order, ends = pieces.sorted_slots(layer.ids[i].view(-1), layer.experts)
    own = torch.diff(ends, prepend=ends.new_zeros(1)).view(world, e)
    theirs = torch.empty_like(own)
    dist.all_to_all_single(theirs, own)
    sent, received = torch.stack([own.sum(1), theirs.sum(1)]).tolist()  # the host waits
    index = pieces.inverse(order).view(-1, topk)
    places = Places(order // topk, order, index)
    rows = pieces.spread(x, places)
    rows = pieces.exchange(rows, received, sent)
    by_expert, local_ends = _by_expert(theirs, sum(received))
    back = pieces.inverse(by_expert)
    rows = pieces.reorder(rows, by_expert, back)
    rows = pieces.experts(rows, local_ends, w_in, w_out)
    rows = pieces.reorder(rows, back, by_expert)
    rows = pieces.exchange(rows, sent, received)
    found: Tensor = pieces.collect(rows, gates, places)
    return found


def _by_expert(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the order by expert of rows that come by source, and where experts end, int32.

    Args:
        counts: [sources, e].
        rows: their sum.
    """
    flat = counts.reshape(-1)
    first = (flat.cumsum(0) - flat).view_as(counts).t().reshape(-1)  # in the order of sources
    parts = counts.t().reshape(-1)
    ends = parts.cumsum(0)
    at = torch.arange(rows, device=counts.device)
    part = torch.searchsorted(ends, at, right=True)
    order = at + (first - (ends - parts))[part]
    return order, ends.view(-1, counts.shape[0])[:, -1].int()


def gathered_places(layer: Layer, ids: Tensor, capacity: int) -> tuple[Places, Tensor]:
    """Return the places of the slots of this rank's experts, and where experts end, int32.

    Args:
        layer: the operands.
        ids: of all ranks.
        capacity: rows; more than there are slots of this rank's experts.
    """
    topk, e = layer.shape.topk, layer.e
    local = ids.reshape(-1) - layer.rank * e
    keys = torch.where((local >= 0) & (local < e), local, e)
    order, ends = pieces.sorted_slots(keys, e)
    capacity = min(capacity, len(order) + 1)  # the last row is of no slot
    pad = capacity - 1
    index = torch.where(keys < e, pieces.inverse(order), pad)
    order = torch.cat([order, order[:1]])[:capacity]
    return Places(order // topk, order, index.view(-1, topk), pad), ends.int()


def all_gather(layer: Layer, i: int, *operands: Tensor) -> Tensor:
    """Return the result of the i-th call. The host does not wait."""
    x, gates, w_in, w_out = operands
    topk = layer.shape.topk
    if gates.requires_grad:
        every_gate = pieces.gather(gates)
        ids = pieces.gathered(layer.ids[i].int())
    else:
        packed = torch.cat([layer.ids[i].int(), gates.view(torch.int32)], 1)
        packed = pieces.gathered(packed)
        ids, every_gate = packed[:, :topk], packed[:, topk:].contiguous().view(torch.float32)
    every_x = pieces.gather(x)
    places, ends = gathered_places(layer, ids, layer.capacity)
    rows = pieces.experts(pieces.spread(every_x, places), ends, w_in, w_out)
    sums = pieces.collect(rows, every_gate, places)
    found: Tensor = pieces.scatter(sums)
    return found
