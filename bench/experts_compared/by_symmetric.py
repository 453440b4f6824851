"""A mixture of experts by PyTorch's symmetric memory: each rank pushes rows to its peers.

The algorithm of torchtitan's MinimalAsyncEP, forward only. Counts of all ranks go to all
ranks. From them each rank computes where its rows belong in the receivers' order of experts, and
later where results belong at the owners of tokens. A barrier follows each push. No host waits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from experts_compared import pieces
from experts_compared.layer import Layer

__all__ = ["Symmetric", "nvshmem"]

Tensor = torch.Tensor


def nvshmem() -> str:
    """Return why all_to_all_vdev_2d cannot be compared; empty if PyTorch finds NVSHMEM."""
    from torch.distributed import _symmetric_memory as symmetric

    try:
        found = symmetric.is_nvshmem_available()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if found else "this PyTorch finds no NVSHMEM"


class Symmetric:
    """Buffers that peers can access, for one point."""

    def __init__(self, layer: Layer) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.layer, group = layer, _group()
        slots = layer.point.tokens * layer.shape.topk
        kinds: list[tuple[tuple[int, int], torch.dtype]] = [
            ((layer.world, layer.experts), torch.int64),
            ((layer.capacity, layer.shape.d), layer.x.dtype),
            ((slots, layer.shape.d), layer.x.dtype),
        ]
        self.own, self.handles = [], []
        for shape, kind in kinds:
            made = symmetric.empty(*shape, dtype=kind, device=layer.x.device)
            self.own.append(made)
            self.handles.append(symmetric.rendezvous(made, group=group))
        self.peers: list[list[Tensor]] = [
            [handle.get_buffer(peer, made.shape, made.dtype) for peer in range(layer.world)]
            for made, handle in zip(self.own, self.handles, strict=True)
        ]
        self.addresses = [
            torch.tensor([each.data_ptr() for each in views], device=layer.x.device)
            for views in self.peers
        ]

    def __call__(self, layer: Layer, i: int, *operands: Any) -> Tensor:
        """Return the result of the i-th call."""
        from experts_compared.kernels import push, slot_sums

        x, gates, w_in, w_out = operands
        topk = layer.shape.topk
        order, ends = pieces.sorted_slots(layer.ids[i].view(-1), layer.experts)
        counts = self._counts(torch.diff(ends, prepend=ends.new_zeros(1)))
        experts = layer.ids[i].view(-1)[order]
        peers, places = targets(counts, experts, layer.rank, layer.e)
        push(x, order // topk, peers, places, self.addresses[1], ends[-1:])
        self.handles[1].barrier(channel=0)
        back_peers, back_places, local_ends = origins(counts, layer.rank, layer.e, layer.capacity)
        rows = pieces.experts(self.own[1], local_ends, w_in, w_out)
        at = torch.arange(layer.capacity, device=x.device)
        push(rows, at, back_peers, back_places, self.addresses[2], local_ends[-1:])
        self.handles[2].barrier(channel=0)
        return slot_sums(self.own[2], pieces.inverse(order).view(-1, topk), gates)

    def _counts(self, own: Tensor) -> Tensor:
        """Return the counts of all ranks' slots by expert: [world, experts]."""
        for view in self.peers[0]:
            view[self.layer.rank].copy_(own)
        self.handles[0].barrier(channel=0)
        return self.own[0]


def _group() -> Any:
    return dist.group.WORLD


def targets(counts: Tensor, experts: Tensor, rank: int, e: int) -> tuple[Tensor, Tensor]:
    """Return the receiver of each of this rank's rows, and its row there.

    Args:
        counts: [world, experts]: slots of each rank by expert.
        experts: of this rank's rows, sorted.
        rank: this rank.
        e: experts of a rank.
    """
    totals = counts.sum(0).view(-1, e)
    first = (totals.cumsum(1) - totals).view(-1) + counts[:rank].sum(0)
    own = counts[rank].cumsum(0) - counts[rank]
    at = torch.arange(len(experts), device=experts.device)
    return experts // e, at + (first - own)[experts]


def origins(counts: Tensor, rank: int, e: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the owner of each of this rank's rows, the row there, and where experts end, int32.

    Args:
        counts: see `targets`.
        rank: this rank.
        e: experts of a rank.
        rows: the rows of the result; those behind the last row have no meaning.
    """
    world = counts.shape[0]
    mine = counts[:, rank * e : (rank + 1) * e]
    parts = mine.t().reshape(-1)  # by expert, then by source
    ends = parts.cumsum(0)
    first = (counts.cumsum(1) - counts)[:, rank * e : (rank + 1) * e].t().reshape(-1)
    at = torch.arange(rows, device=counts.device)
    part = torch.searchsorted(ends, at, right=True).clamp(max=len(parts) - 1)
    places = at + (first - (ends - parts))[part]
    return part % world, places, ends.view(-1, world)[:, -1].int()
