"""Routing: which rows the experts of this rank multiply, and route(), which finds it out.

    routing = ficco.route(ids, experts=64, gates=gates, group=ep)
    z = ficco.dispatch_matmul(x, routing, w_in, group=ep)
    y = ficco.matmul_combine(activation(z), routing, w_out, group=ep)

`ficco.moe` makes these calls. `operators.routing` has the layout of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ficco.api import torch_library
from ficco.api.arguments import check_dense, check_held, process_group
from ficco.api.arguments import sizes as whole_sizes
from ficco.api.autograd import dispatch
from ficco.api.expert_status import wrong_id
from ficco.api.groups import collective
from ficco.api.routes import survey
from ficco.core.checking import whole_number
from ficco.core.errors import InputError, shown
from ficco.kernels.experts import Rows
from ficco.operators.problem_checks import MOST
from ficco.operators.routing import MOST_EXPERTS, MOST_SLOTS, Routed, Table, parts_of
from ficco.runtime.members import rank_in

Tensor = torch.Tensor

OPERATORS = torch_library.NAMES  # the custom operators; this import registers them
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_compiling = torch.compiler.is_dynamo_compiling


@dataclass(frozen=True, eq=False)
class Routing:
    """Which rows the experts of this rank multiply, as `ficco.route` returns it.

    A slot is one of the k experts of a token. Slots of all ranks are numbered: the number of the
    token among all M tokens, times k, plus the place in the token. A row is a slot whose expert is
    on this rank. Tensors are on the device of the ids; nothing here waits for it, except for
    `count`.

    Attributes:
        table: int32 [4 + 2 e + T k + M k]: rows, ends of experts, own ids, slots of the rows.
        topk: k, slots of a token.
        experts: e, the experts of a rank.
        rows: tokens by rank.
        rank: this rank.
        gates: float32 [M k], the gates of all slots, which is differentiable; None: there are none.
        capacity: rows for which this rank has room, in the results of `dispatch_matmul`; None: it
            makes room for all.

    Example:
        >>> ids = torch.tensor([[1, 0], [0, -1]])  # 2 tokens, 2 slots; -1 is no expert
        >>> routing = ficco.route(ids, experts=2)
        >>> routing.slots.tolist(), routing.ends.tolist(), routing.count()
        ([1, 2, 0, -1], [2, 3], 3)
    """

    table: Tensor
    topk: int
    experts: int
    rows: tuple[int, ...]
    rank: int
    gates: Tensor | None = None
    capacity: int | None = None

    @property
    def sizes(self) -> Routed:
        """The sizes of the table."""
        return Routed(self.experts, self.topk, self.rows)

    @property
    def parts(self) -> Table:
        """The parts of the table, as views."""
        return parts_of(self.table, self.sizes, self.rank)

    @property
    def needed(self) -> Tensor:
        """The number of rows, of no dimension."""
        return self.table[0]

    @property
    def ends(self) -> Tensor:
        """[e]: where the rows of each expert end."""
        ends: Tensor = self.parts.ends
        return ends

    @property
    def own_ends(self) -> Tensor:
        """[e]: where the rows of this rank's tokens end, which come first in each expert."""
        ends: Tensor = self.parts.own_ends
        return ends

    @property
    def own_ids(self) -> Tensor:
        """[T, k]: the experts of this rank's tokens."""
        ids: Tensor = self.parts.own.view(-1, self.topk)
        return ids

    @property
    def slots(self) -> Tensor:
        """[M k]: the slots of the rows, in the order of rows; -1 behind the last one."""
        slots: Tensor = self.parts.slots
        return slots

    @property
    def listed(self) -> Rows:
        """The list of rows, as ficco's kernels take it."""
        return Rows.of(self.sizes, self.rank, self.table)

    def row_gates(self, count: int) -> Tensor:
        """Return the gates of the first `count` rows, float32 [count], 0 behind the last row.

        It is differentiable: the gradient returns to the owners of tokens, in one collective.

        Raises:
            InputError: the routing has no gates.
        """
        if self.gates is None:
            raise InputError("the routing has no gates; pass gates= to ficco.route")
        spare = torch.arange(count, device=self.table.device) + self.gates.shape[0]
        slots = self.slots[:count]
        if slots.shape[0] < count:
            slots = torch.nn.functional.pad(slots, (0, count - slots.shape[0]), value=-1)
        # A zero for each row without a slot: one for all would collect all their gradients.
        places = torch.where(slots < 0, spare, slots.long())
        zeros = self.gates.new_zeros(count)
        return torch.cat([self.gates, zeros]).gather(0, places)

    def count(self) -> int:
        """Return the number of rows; the host waits for the device.

        Raises:
            InputError: an id is not below the number of experts; on all ranks.
        """
        needed, status, *_ = self.table[:3].tolist()
        if status:
            rank, token = self.sizes.token_of(status - 1)
            where = "" if rank == self.rank else f" (rank {self.rank} has no wrong id itself)"
            found = f"{self.experts * len(self.rows)} or more"
            if rank == self.rank:
                found = str(int(self.own_ids[token, (status - 1) % self.topk]))
            raise InputError(wrong_id(rank, token, found) + where)
        return int(needed)


@collective
def route(
    ids: Tensor,
    experts: int,
    *,
    gates: Tensor | None = None,
    rows: Sequence[int] | None = None,
    capacity: int | None = None,
    group: Any = None,
) -> Routing:
    """Send the experts of all tokens to all ranks, and list the rows of this rank's experts.

    A collective call: all ranks make it, after torch.distributed.init_process_group. Rank r owns
    the experts from r e to r e + e - 1, where e = experts / ranks. One all-gather sends ids and
    gates. The host does not wait for the device. It is differentiable in the gates.

    Args:
        ids: [T, k] integers: the experts of each of this rank's tokens. A negative id is no expert.
            The same expert may occur twice in a token.
        experts: the number of experts on all ranks, at most 1024.
        gates: [T, k], a factor of each slot; converted to float32.
        rows: tokens by rank, the same list on all ranks; needed if they differ. None: all equal
            this rank's.
        capacity: rows for which this rank makes room, 1 or more. If a rank gets more rows, or if an
            id is not below `experts`, a later `ficco.route`, `ficco.moe` or
            `ficco.synchronize` raises an error on every rank. Without a capacity the rank makes
            room for all rows, and `Routing.count` raises the error.
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.

    Returns:
        The routing, for `dispatch_matmul` and `matmul_combine`.

    Raises:
        InputError: arguments do not fit, or an earlier call had too many rows or a wrong id.
        EngineError: a rank has failed or makes another call.

    Example:
        >>> ids = torch.tensor([[0, 3], [2, 3]])
        >>> routing = ficco.route(ids, experts=4)  # this is one rank alone
        >>> routing.slots.tolist(), routing.ends.tolist()
        ([0, 2, 1, 3], [1, 1, 2, 4])
    """
    _check_ids(ids)
    pg = process_group(group)
    rank, world = rank_in(pg), dist.get_world_size(pg)
    e = experts_per_rank(experts, world)
    counts = _rows(rows, ids.shape[0], rank, world)
    if gates is not None:
        _check_gates(gates, ids)
        gates = gates.float() if torch.is_grad_enabled() else gates.detach().float()
    if capacity is not None:
        capacity = checked_capacity(capacity)
    if not _compiling() and sum(counts) * ids.shape[1] > MOST_SLOTS:
        raise InputError(
            f"ids: {sum(counts)} tokens of all ranks have {ids.shape[1]} slots each; {MOST_SLOTS} "
            "slots are possible in a call: split the tokens into several calls"
        )
    args = (ids, gates, experts, group, counts, capacity)
    outputs = dispatch("route_experts", args, survey((ids, gates)))
    gathered = outputs[1] if gates is not None else None
    return Routing(outputs[0], ids.shape[1], e, tuple(counts), rank, gathered, capacity)


def experts_per_rank(experts: Any, world: int) -> int:
    """Return the experts of each rank.

    Raises:
        InputError: ranks would not have equally many, or there are too many.
    """
    if not _compiling():
        experts = whole_number(experts, "experts (of all ranks)", 1, MOST_EXPERTS)
    if experts % world:
        raise InputError(
            f"experts={experts} on {world} ranks: each rank needs equally many; use a group of "
            "another size, or add experts that no token chooses"
        )
    return int(experts // world)


def checked_capacity(capacity: Any) -> int:
    """Return a capacity.

    Raises:
        InputError: it is not a whole number of 1 or more.
    """
    if _compiling() or isinstance(capacity, torch.SymInt):
        return capacity  # type: ignore[no-any-return]
    return whole_number(capacity, "capacity (rows)", 1, MOST)


def _check_ids(ids: Any) -> None:
    if not isinstance(ids, Tensor):
        raise InputError(f"ids: {type(ids).__name__} found; a torch tensor is needed")
    check_dense(ids, "ids")
    if ids.dim() != 2 or not ids.shape[1]:
        raise InputError(f"ids is {list(ids.shape)}; [tokens, k] with k of 1 or more is needed")
    if ids.dtype not in _INTEGERS:
        raise InputError(f"ids is {ids.dtype}; integers are needed, such as int64 or int32")
    if ids.device.type not in ("cpu", "cuda"):
        raise InputError(f"ids is on {ids.device}; it must be on the CPU or on a GPU")
    check_held(ids, "ids")


def _check_gates(gates: Any, ids: Tensor) -> None:
    if not isinstance(gates, Tensor):
        raise InputError(f"gates: {type(gates).__name__} found; a torch tensor is needed")
    check_dense(gates, "gates")
    if gates.shape != ids.shape:
        raise InputError(f"gates is {list(gates.shape)}, ids is {list(ids.shape)}; give one shape")
    if not gates.is_floating_point():
        raise InputError(f"gates is {gates.dtype}; float32 or the dtype of x is needed")
    if gates.device != ids.device:
        raise InputError(f"gates is on {gates.device}, ids is on {ids.device}; give one device")
    check_held(gates, "gates")


def _rows(rows: Any, own: int, rank: int, world: int) -> list[int]:
    counts: list[int] = [own] * world if rows is None else whole_sizes("rows", rows)
    if _compiling():
        return counts
    if len(counts) != world:
        raise InputError(
            f"rows={shown(counts)}: {len(counts)} sizes found; {world} are needed, one per rank"
        )
    for other, count in enumerate(counts):
        if isinstance(count, int) and count < 0:
            raise InputError(f"rows[{other}]={shown(count)}: a size of 0 or more is needed")
    if counts[rank] != own:
        raise InputError(f"rows[{rank}]={counts[rank]}, but ids has {own} rows")
    return counts
