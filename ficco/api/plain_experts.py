"""The products of experts by torch.distributed and PyTorch, without overlap.

All rows are gathered, and every slot returns in a place of its own. So the host needs no count.
Only products on the CPU, and those that are not bfloat16, read where the rows of experts end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ficco.api.arguments import process_group
from ficco.api.expert_tables import HEAD, Sizes
from ficco.api.routing import Routing
from ficco.core.private.torch_core import DisableAutocast
from ficco.runtime import distributed
from ficco.runtime.members import rank_in

Tensor = torch.Tensor


def dispatch_matmul(
    x: Tensor, routing: Routing, w: Tensor, *, capacity: int | None = None, group: Any = None,
    schedule: Any = "auto",
) -> Tensor:  # fmt: skip
    """Return the rows of this rank's experts, times the weight of their expert, [capacity, n].

    Args:
        x: [T, d].
        routing: of the tokens.
        w: [e, d, n].
        capacity: rows of the result; None: that of the routing, else as many as are needed.
        group: the group.
        schedule: not used.
    """
    room = capacity or routing.capacity or max(routing.count(), 1)
    rows = list(routing.rows)
    y: Tensor = torch.ops.ficco_plain.dispatch(
        x, routing.table, w, rows, routing.topk, room, _name(group)
    )
    return y


def matmul_combine(
    h: Tensor, routing: Routing, w: Tensor, *, group: Any = None, schedule: Any = "auto"
) -> Tensor:
    """Return for each of this rank's tokens the sum of its rows, times the weight of their expert.

    Args:
        h: [C, f], rows of this rank's experts.
        routing: of the tokens.
        w: [e, f, d].
        group: the group.
        schedule: not used.
    """
    y: Tensor = torch.ops.ficco_plain.combine(
        h, routing.table, w, list(routing.rows), routing.topk, _name(group)
    )
    return y


def _name(group: Any) -> str:
    name: str = process_group(group).group_name
    return name


class _Plan:
    """The parts of a table, for `room` rows."""

    def __init__(
        self, table: Tensor, rows: Sequence[int], topk: int, experts: int, room: int, group: str
    ) -> None:
        self.group = process_group(group)
        self.sizes = Sizes(rank_in(self.group), tuple(rows), topk, experts)
        self.needed = table[0]
        self.ends = table[HEAD : HEAD + experts].clamp(max=room)
        self.own_ids = table[self.sizes.ids : self.sizes.listed].view(-1, topk)
        self.all_slots = table[self.sizes.listed :].long()
        slots = self.all_slots[:room]
        self.slots = torch.nn.functional.pad(slots, (0, room - slots.shape[0]), value=-1)
        self.empty = (self.slots < 0).unsqueeze(1)

    def taken(self, x: Tensor) -> Tensor:
        """Return the row of x [T, d] of each row, of all ranks; zeros behind the last one."""
        whole = x.contiguous()
        if self.sizes.world > 1:
            whole = distributed.gathered(whole, self.sizes.rows, self.group)
        if not whole.shape[0]:
            return x.new_zeros((self.slots.shape[0], x.shape[1]))
        tokens = (self.slots // self.sizes.topk).clamp(min=0)
        return whole[tokens].masked_fill_(self.empty, 0)

    def returned(self, rows: Tensor, lost: float) -> Tensor:
        """Return the sum of rows [C, d] by token of this rank, in float32, then rounded.

        A slot without a row is 0; one whose row had no place is `lost`.
        """
        sizes = self.sizes
        spare = sizes.slots  # where rows without a slot go
        parts = rows.new_zeros((sizes.slots + 1, rows.shape[1]))
        unplaced = self.all_slots[rows.shape[0] :]
        parts[torch.where(unplaced < 0, spare, unplaced)] = lost
        parts[torch.where(self.slots < 0, spare, self.slots)] = rows
        mine = self._own(parts[:-1]).view(-1, sizes.topk, rows.shape[1])
        total = torch.zeros_like(mine[:, 0], dtype=torch.float32)
        for j in range(sizes.topk):
            total += mine[:, j].float()
        return total.to(rows.dtype)

    def _own(self, parts: Tensor) -> Tensor:
        """Return the sum over ranks of this rank's slots [T*k, d]; one rank has each."""
        sizes = self.sizes
        if sizes.world == 1:
            return parts
        if not parts.is_cuda:
            dist.all_reduce(parts, group=self.group)
            return parts[sizes.first : sizes.first + sizes.own]
        counts = [count * sizes.topk for count in sizes.rows]
        padded = [
            torch.nn.functional.pad(piece, (0, 0, 0, sizes.padded - piece.shape[0]))
            for piece in torch.split(parts, counts)
        ]
        mine = parts.new_empty((sizes.padded, parts.shape[1]))
        distributed.reduce_scatter(mine, torch.cat(padded), group=self.group)
        return mine[: sizes.own]


def _grouped(rows: Tensor, w: Tensor, plan: _Plan) -> Tensor:
    """Return the rows of each expert times its weight; zeros behind the last one."""
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        product: Tensor = torch.nn.functional.grouped_mm(rows, w, offs=plan.ends)
        return product.masked_fill_(plan.empty, 0)
    y, begin = rows.new_zeros((rows.shape[0], w.shape[2])), 0
    for expert, end in enumerate(plan.ends.tolist()):
        y[begin:end] = rows[begin:end] @ w[expert]
        begin = end
    return y


def _weights(left: Tensor, right: Tensor, plan: _Plan) -> Tensor:
    """Return left^T . right of the rows of each expert."""
    if left.is_cuda and left.dtype == torch.bfloat16:
        product: Tensor = torch.nn.functional.grouped_mm(left.t(), right, offs=plan.ends)
        return product
    dw, begin = left.new_zeros((plan.sizes.experts, left.shape[1], right.shape[1])), 0
    for expert, end in enumerate(plan.ends.tolist()):
        dw[expert] = left[begin:end].t() @ right[begin:end]
        begin = end
    return dw


def _dispatch(
    x: Tensor, table: Tensor, w: Tensor, rows: list[int], topk: int, room: int, group: str
) -> Tensor:
    plan = _Plan(table, rows, topk, w.shape[0], room, group)
    return _grouped(plan.taken(x), w, plan)


def _dispatch_back(
    dy: Tensor, x: Tensor, table: Tensor, w: Tensor, rows: list[int], topk: int, group: str
) -> tuple[Tensor, Tensor]:
    plan = _Plan(table, rows, topk, w.shape[0], dy.shape[0], group)
    dy = dy.masked_fill(plan.empty, 0)
    dx = plan.returned(_grouped(dy, w.transpose(1, 2), plan), float("nan"))
    return dx, _weights(plan.taken(x), dy, plan)


def _combine(
    h: Tensor, table: Tensor, w: Tensor, rows: list[int], topk: int, group: str
) -> Tensor:  # fmt: skip
    plan = _Plan(table, rows, topk, w.shape[0], h.shape[0], group)
    y = plan.returned(_grouped(h, w, plan), float("nan"))
    wrong = (plan.own_ids >= w.shape[0] * plan.sizes.world).any(1, keepdim=True)
    return y.masked_fill_(wrong, float("nan"))


def _combine_back(
    dy: Tensor, h: Tensor, table: Tensor, w: Tensor, rows: list[int], topk: int, group: str
) -> tuple[Tensor, Tensor]:
    plan = _Plan(table, rows, topk, w.shape[0], h.shape[0], group)
    dys = plan.taken(dy)
    clean = h.masked_fill(plan.empty, 0)
    return _grouped(dys, w.transpose(1, 2), plan), _weights(clean, dys, plan)


_SIZES = "SymInt[] rows, SymInt topk"


def _define(name: str, schema: str, run: Any, fake: Any) -> None:
    def impl(*args: Any) -> Any:
        with DisableAutocast():
            return run(*args)

    torch.library.define(f"ficco_plain::{name}", schema)
    torch.library.impl(f"ficco_plain::{name}", "default", impl)
    torch.library.register_fake(f"ficco_plain::{name}", fake)


_define(
    "dispatch", f"(Tensor x, Tensor table, Tensor w, {_SIZES}, SymInt room, str group) -> Tensor",
    _dispatch, lambda x, table, w, rows, topk, room, group: x.new_empty((room, w.shape[2])),
)  # fmt: skip
_define(
    "combine", f"(Tensor h, Tensor table, Tensor w, {_SIZES}, str group) -> Tensor", _combine,
    lambda h, table, w, rows, topk, group: h.new_empty(
        (rows[rank_in(process_group(group))], w.shape[2])
    ),
)  # fmt: skip
_BACK = f"(Tensor dy, Tensor x, Tensor table, Tensor w, {_SIZES}, str group) -> (Tensor, Tensor)"


def _like(dy: Tensor, x: Tensor, table: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), w.new_empty(w.shape)


_define("dispatch_back", _BACK, _dispatch_back, _like)
_define("combine_back", _BACK, _combine_back, _like)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, table, w, rows, topk, *_, group = inputs
    ctx.save_for_backward(x, table, w)
    ctx.rest = (rows, topk, group)


def _dispatch_gradient(ctx: Any, dy: Tensor) -> Any:
    dx, dw = torch.ops.ficco_plain.dispatch_back(dy, *ctx.saved_tensors, *ctx.rest)
    return dx, None, dw, None, None, None, None


def _combine_gradient(ctx: Any, dy: Tensor) -> Any:
    dh, dw = torch.ops.ficco_plain.combine_back(dy, *ctx.saved_tensors, *ctx.rest)
    return dh, None, dw, None, None, None


torch.library.register_autograd("ficco_plain::dispatch", _dispatch_gradient, setup_context=_keep)
torch.library.register_autograd("ficco_plain::combine", _combine_gradient, setup_context=_keep)
