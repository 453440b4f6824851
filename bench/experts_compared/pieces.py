"""Parts of PyTorch's ways, with their gradients: permutes, weighted sums, transfers, experts.

Sums of slots can be made in three ways. `Sums` has the one that is fastest for the point.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from ficco.runtime import distributed

__all__ = [
    "Places", "Sums", "activation", "collect", "exchange", "experts", "gather", "gathered",
    "inverse", "reorder", "scatter", "sorted_slots", "spread",
]  # fmt: skip

Tensor = torch.Tensor
F: Any = torch.nn.functional
TIMED = 5  # calls of a graph that is timed


class Places(NamedTuple):
    """Where the rows of slots are.

    Attributes:
        token: [rows], the token of each row.
        slot: [rows], the slot of each row, token * k + j.
        rows: [tokens, k], the row of each slot; `pad` if it has none.
        pad: a row that belongs to no slot; -1: each slot has a row.
    """

    token: Tensor
    slot: Tensor
    rows: Tensor
    pad: int = -1


def sorted_slots(keys: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Sort keys stably; return the order, and where the slots of each key below `bins` end."""
    values, order = keys.to(torch.int16).sort(stable=True)
    every = torch.arange(bins, dtype=torch.int16, device=keys.device)
    return order, torch.searchsorted(values, every, right=True)


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), dtype=order.dtype, device=order.device)
    return places


# ---- sums of slots


def by_bag(rows: Tensor, places: Places, gates: Tensor | None) -> Tensor:
    """Sum by embedding_bag: it reads each row once."""
    weights = None if gates is None else gates.to(rows.dtype)
    pad = None if places.pad < 0 else places.pad
    found: Tensor = F.embedding_bag(
        places.rows, rows, mode="sum", per_sample_weights=weights, padding_idx=pad
    )
    return found


def by_select(rows: Tensor, places: Places, gates: Tensor | None) -> Tensor:
    """Sum by index_select, then a product with the gates or a sum."""
    tokens, topk = places.rows.shape
    if places.pad >= 0:
        rows[places.pad].zero_()
    taken = rows.index_select(0, places.rows.flatten()).view(tokens, topk, -1)
    if gates is None:
        return taken.sum(1)
    return torch.bmm(gates.to(rows.dtype).unsqueeze(1), taken).squeeze(1)


def by_add(rows: Tensor, places: Places, gates: Tensor | None) -> Tensor:
    """Sum by index_add_, in the order of rows; rows of no slot go to one more token."""
    tokens = places.rows.shape[0]
    if gates is not None:
        rows = rows * gates.flatten()[places.slot].unsqueeze(1).to(rows.dtype)
    token = places.token
    if places.pad >= 0:
        at = torch.arange(len(token), device=token.device)
        there = (places.rows.flatten()[places.slot] == at) & (at != places.pad)
        token = torch.where(there, token, tokens)
    return rows.new_zeros(tokens + 1, rows.shape[1]).index_add_(0, token, rows)[:tokens]


class Sums:
    """The ways to sum that are used, without and with a row for no slot; `choose` times all."""

    ways: ClassVar[dict[str, Callable[..., Tensor]]] = {
        "embedding_bag": by_bag, "index_select": by_select, "index_add": by_add,
    }  # fmt: skip
    chosen: ClassVar[dict[bool, str]] = {False: "embedding_bag", True: "embedding_bag"}

    @classmethod
    def run(cls, rows: Tensor, places: Places, gates: Tensor | None) -> Tensor:
        """Return the sums of the slots of each token."""
        return cls.ways[cls.chosen[places.pad >= 0]](rows, places, gates)

    @classmethod
    def choose(
        cls, rows: Tensor, places: Places, gates: Tensor, agree: Callable[[float], list[float]]
    ) -> dict[str, float | None]:
        """Time all ways as graphs, and take the one whose slowest rank is fastest.

        Args:
            rows: of a call.
            places: of the rows.
            gates: [tokens, k].
            agree: gathers a number of each rank.

        Returns:
            Milliseconds by way; None if it cannot be captured.
        """
        found = {}
        for name, way in cls.ways.items():
            mine = _graph_ms(lambda way=way: way(rows, places, gates))  # type: ignore[misc]
            found[name] = round(max(agree(mine)), 4)
        cls.chosen[places.pad >= 0] = min(found, key=found.__getitem__)
        return {name: ms if math.isfinite(ms) else None for name, ms in found.items()}


def _graph_ms(call: Callable[[], object]) -> float:
    """Return milliseconds of a call in a graph; infinite if it cannot be captured."""
    from ficco.measure.clock import captured, device_ms

    try:
        call()
        torch.cuda.synchronize()
        graph = captured(lambda: [call() for _ in range(TIMED)])
        graph.replay()
        return min(device_ms(graph.replay) / TIMED for _ in range(3))
    except RuntimeError:
        return math.inf


# ---- functions with gradients


class Spread(torch.autograd.Function):
    """Rows of slots: the row of its token for each. Backward sums the rows of each token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places) -> Tensor:
        """Return x[token of row]."""
        ctx.places = places
        return x.index_select(0, places.token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x."""
        return Sums.run(grad.contiguous(), ctx.places, None), None


class Collect(torch.autograd.Function):
    """For each token the sum of its slots' rows times gates."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, places: Places) -> Tensor:
        """Return the sums."""
        ctx.save_for_backward(rows, gates)
        ctx.places = places
        return Sums.run(rows, places, gates)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of rows and gates."""
        rows, gates = ctx.saved_tensors
        places = ctx.places
        taken = dy.index_select(0, places.token)
        products = (rows * taken).sum(1, dtype=torch.float32)
        if places.pad >= 0:
            products[places.pad] = 0.0
        dgates = products[places.rows.flatten()].view_as(gates)
        row_gates = gates.flatten()[places.slot].to(rows.dtype)
        return taken.mul_(row_gates.unsqueeze(1)), dgates.to(gates.dtype), None


class Reorder(torch.autograd.Function):
    """Rows in another order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        """Return rows[order]; `back` is the inverse of `order`."""
        ctx.back = back
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of rows."""
        return grad.index_select(0, ctx.back), None, None


class Exchange(torch.autograd.Function):
    """An all-to-all of rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Return the rows that this rank receives."""
        ctx.splits = received, sent
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows, received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the rows, from their receivers."""
        received, sent = ctx.splits
        out = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), sent, received)
        return out, None, None


class Gather(torch.autograd.Function):
    """An all-gather; its backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the rows of all ranks."""
        return gathered(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient of this rank's rows."""
        return scattered(grad)


class Scatter(torch.autograd.Function):
    """A reduce-scatter; its backward is an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the sums of this rank's rows."""
        return scattered(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient of the rows of all ranks."""
        return gathered(grad)


def gathered(x: Tensor) -> Tensor:
    """Return the rows of all ranks."""
    out = x.new_empty(dist.get_world_size() * x.shape[0], *x.shape[1:])
    distributed.all_gather(out, x.contiguous())
    return out


def scattered(x: Tensor) -> Tensor:
    """Return the sum over ranks of this rank's part of the rows."""
    out = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    distributed.reduce_scatter(out, x.contiguous())
    return out


spread: Any = Spread.apply
collect: Any = Collect.apply
reorder: Any = Reorder.apply
exchange: Any = Exchange.apply
gather: Any = Gather.apply
scatter: Any = Scatter.apply

# ---- experts


class FusedActivation(torch.autograd.Function):
    """The activation of `activation`, one kernel for each direction."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, ends: Tensor) -> Tensor:
        """Return the activations."""
        from experts_compared.kernels import silu_mul

        ctx.save_for_backward(z, ends)
        return silu_mul(z, ends[-1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of z."""
        from experts_compared.kernels import silu_mul_gradient

        z, ends = ctx.saved_tensors
        return silu_mul_gradient(z, grad.contiguous(), ends[-1:]), None


def activation(z: Tensor, ends: Tensor) -> Tensor:
    """Return silu of the first half of the rows, times the second half."""
    if z.is_cuda:
        fused: Any = FusedActivation.apply
        return fused(z, ends)  # type: ignore[no-any-return]
    gate, up = z.chunk(2, -1)
    found: Tensor = F.silu(gate) * up
    return found


def experts(rows: Tensor, ends: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """Return the results of experts; rows are sorted by expert, and `ends` is int32."""
    operators: Any = torch
    if not len(rows):
        return rows + 0 * (w_in[:1, :1, :1].sum() + w_out[:1, :1, :1].sum())
    h = activation(operators._grouped_mm(rows, w_in, offs=ends), ends)
    found: Tensor = operators._grouped_mm(h, w_out, offs=ends)
    return found
