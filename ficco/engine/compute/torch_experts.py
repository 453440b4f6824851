"""Rows times the weights of their experts by PyTorch: on CPUs, and by ficco's kernels on GPUs.

Programs of a library use it (`serial`), and gradients of weights. Nothing waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ficco.engine.compute import experts
from ficco.kernels import experts as kernels
from ficco.kernels.experts_gradient import listed_rows, weight_gradient
from ficco.operators.routing import Routed, parts_of
from ficco.plan import Experts

Tensor = torch.Tensor


def perform(
    work: Experts,
    rank: int,
    routing: Tensor,
    weight: Tensor | None,
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
) -> None:
    """Do the work of a rank; arguments as of `experts.perform`."""
    if not routing.is_cuda:
        experts.perform(work, rank, routing.numpy(), weight, sources, targets)
        return
    rows, sizes = kernels.Rows.of(work.sizes, rank, routing), work.sizes
    if work.mode == "sum":
        _sum(work, rows, sources[0], targets[0])
        return
    assert weight is not None
    w = weight.reshape(sizes.experts, -1, weight.shape[1])
    if work.mode == "gather":  # the tokens of all ranks, one below the other
        whole = sources[0].as_strided((rows.tokens, sources[0].shape[1]), sources[0].stride())
        own = whole[rows.own_begin : rows.own_end]
        kernels.grouped(rows, own if len(own) else whole, whole, w, targets[0], work.turned)
        return
    returned = targets[0].as_strided((sizes.slots, targets[0].shape[1]), targets[0].stride())
    kernels.grouped_return(rows, sources[0], w, returned, turned=work.turned)


def _sum(work: Experts, rows: kernels.Rows, source: Tensor, target: Tensor) -> None:
    """Add up the rows that this rank's experts return, for the tokens of all ranks."""
    if not work.adds_own:
        kernels.slot_sums(rows, source, target)
        return
    sizes, listed = work.sizes, rows.routing[rows.list_at :].long()
    spare = torch.full_like(listed, sizes.slots)
    present = torch.zeros(sizes.slots + 1, dtype=torch.bool, device=source.device)
    present.index_fill_(0, torch.where(listed < 0, spare, listed), True)
    present = present[:-1].view(-1, sizes.topk)
    each = source.view(-1, sizes.topk, source.shape[1])
    total = torch.zeros(target.shape, dtype=torch.float32, device=source.device)
    for slot in range(sizes.topk):
        total += torch.where(present[:, slot : slot + 1], each[:, slot], 0)
    own = rows.routing[rows.ids_at : rows.list_at].view(-1, sizes.topk)
    wrong = (own >= sizes.experts * len(sizes.rows)).any(1, keepdim=True)
    mine = total[rows.own_begin : rows.own_end]
    mine.copy_(torch.where(wrong, torch.nan, mine))
    target.copy_(total)


def gradient(
    tokens: Tensor,
    rows: Tensor,
    routing: Tensor,
    sizes: Routed,
    rank: int,
    by_tokens: bool,
    result: Tensor,
) -> None:
    """Store the gradient of the weights of a rank's experts, [e, k, n].

    Args:
        tokens: of all ranks; contiguous.
        rows: in the order of the list; contiguous.
        routing: the table, of one dimension.
        sizes: of the table.
        rank: of the table.
        by_tokens: tokens^T rows; else rows^T tokens.
        result: receives the gradient.
    """
    if not rows.is_cuda:
        table = parts_of(np.asarray(routing), sizes, rank)
        experts.gradient(tokens, rows, table, sizes.topk, by_tokens, result)
        return
    listed = kernels.Rows.of(sizes, rank, routing)
    tokens, rows = tokens.contiguous(), rows.contiguous()
    own = tokens[listed.own_begin : listed.own_end]
    chosen = tokens.new_empty((len(rows), tokens.shape[1]))
    listed_rows(listed, own if len(own) else tokens, tokens, chosen)
    first, second = (chosen, rows) if by_tokens else (rows, chosen)
    weight_gradient(listed, first, second, result)
