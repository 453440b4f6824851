"""How ids of experts become a routing table: one collective, then work on the device.

Every rank gets the ids of all ranks, so each makes its table alone, and knows the rows and the
capacity of all others. Nothing here waits for the device. `operators.routing` has the layout of a
table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ficco.api import expert_status, groups
from ficco.api.arguments import process_group
from ficco.api.expert_status import OVERFLOW, WRONG_ID
from ficco.core.errors import InputError
from ficco.kernels import experts as kernels
from ficco.operators.routing import LARGEST_ID, Routed
from ficco.operators.routing import table as routing_table
from ficco.runtime import distributed
from ficco.runtime.members import rank_in

Tensor = torch.Tensor

_UNLIMITED = 2**31 - 1  # the capacity of a rank that makes room for all rows
_MOST_AGREED = 4096
_agreed: WeakKeyDictionary[Any, set[tuple[int, ...]]] = WeakKeyDictionary()  # by runtimes of GPUs


def route_experts(
    ids: Tensor,
    gates: Tensor | None,
    experts: int,
    group: Any,
    rows: Sequence[int],
    capacity: int | None,
) -> list[Tensor]:
    """Return the routing table of this rank, and the gates of all slots [M*k] if there are any.

    Args:
        ids: [T, k] integers.
        gates: [T, k] float32, or None.
        experts: of all ranks.
        group: the group.
        rows: tokens by rank.
        capacity: rows for which this rank has room; None: it makes room for all.
    """
    pg = process_group(group)
    rank, world = rank_in(pg), dist.get_world_size(pg)
    sizes = Routed(experts // world, ids.shape[1], tuple(rows))
    if not ids.is_cuda:
        expert_status.check(pg, ids.device)
    given = 0 if gates is None else 1 + gates.requires_grad
    if world > 1:
        _meet(pg, ids, (sizes.topk, experts, given, *sizes.rows))
    limit = _UNLIMITED if capacity is None else capacity
    whole = _exchanged(ids, gates, limit, sizes, pg)
    if ids.is_cuda:  # behind the collective, in which peers that have seen no fault would wait
        expert_status.check(pg, ids.device)
    end = 1 + _padded_slots(sizes)
    status = None if capacity is None else expert_status.status_of(pg, ids.device)
    joined = _joined(whole[:, 1:end], sizes)
    table = _table(joined, sizes, rank, status, whole)
    if status is not None and not ids.is_cuda:
        status.note(_fault(joined, whole[:, 0], sizes, status.tag_of(sizes)))
    if gates is None:
        return [table]
    return [table, _joined(whole[:, end:], sizes).view(torch.float32)]


def return_gates(dgates: Tensor, topk: int, group: Any, rows: Sequence[int]) -> Tensor:
    """Return the sums over ranks of gradients [M*k] of this rank's own slots, [T, k].

    At most one rank has a gradient of a slot that is not zero, so the order of the sum is of no
    consequence.
    """
    pg = process_group(group)
    rank, sizes = rank_in(pg), Routed(1, topk, tuple(rows))
    own = (rows[rank], topk)
    if len(rows) == 1:
        return dgates.reshape(own).clone()
    whole = dgates.contiguous().clone()
    dist.all_reduce(whole, group=pg)
    return whole[sizes.first_slot(rank) : sizes.first_slot(rank + 1)].reshape(own).clone()


def _meet(pg: Any, ids: Tensor, numbers: tuple[int, ...]) -> None:
    """Compare numbers that all ranks must have, before a collective that would hang otherwise.

    Ranks on the CPU meet in each call, so that a rank learns of a peer that raised an error. Those
    on GPUs meet in the first call with these numbers.

    Raises:
        InputError: numbers differ. EngineError: a peer has failed or does not call.
    """
    if groups.disabled():
        return
    runtime = groups.gpu_runtime(pg, ids.device) if ids.is_cuda else groups.runtime(pg)
    if runtime is None:
        return
    runtime.check_alive()
    known = _agreed.setdefault(runtime, set())
    if ids.is_cuda and numbers in known:
        return
    if len(known) >= _MOST_AGREED:  # on all ranks in the same call
        known.clear()
    what = f"route tokens: {numbers[0]} slots a token, {numbers[1]} experts"
    by_rank = runtime.gathered("route tokens to experts", list(numbers), f"This rank would {what}.")
    _compare([tuple(other) for other in by_rank])
    known.add(numbers)


def _compare(by_rank: Sequence[tuple[int, ...]]) -> None:
    """Refuse numbers of ranks that differ.

    Raises:
        InputError: they do, on all ranks.
    """
    for rank, other in enumerate(by_rank):
        names = ("slots a token (k)", "experts", "gates (1: given, 2: with a gradient)")
        for name, mine, found in zip(names, by_rank[0], other, strict=False):
            if mine != found:
                raise InputError(
                    f"rank 0 has {mine} {name} and rank {rank} has {found}; pass the same on all "
                    "ranks"
                )
        if other[3:] != by_rank[0][3:]:
            raise InputError(
                f"rank 0 assumes that ranks have {list(by_rank[0][3:])} tokens, and rank {rank} "
                f"{list(other[3:])}; pass the tokens of all ranks as rows="
            )


def _padded_slots(sizes: Routed) -> int:
    """Return the slots of each rank as they travel: ranks with fewer tokens pad."""
    return max(sizes.rows) * sizes.topk


def _exchanged(ids: Tensor, gates: Tensor | None, limit: int, sizes: Routed, pg: Any) -> Tensor:
    """Return per rank: its capacity, its ids and the bits of its gates, padded to one length."""
    wide, length, world = ids.dtype == torch.int64, _padded_slots(sizes), len(sizes.rows)
    if ids.is_cuda:
        size = 1 + length * (1 if gates is None else 2)
        own = torch.empty((1, size), dtype=torch.int32, device=ids.device)
        given = None if gates is None else gates.contiguous()
        kernels.pack((ids if wide else ids.int()).contiguous(), given, limit, length, own)
        return own if world == 1 else distributed.gathered(own, (1,) * world, pg)
    narrow = (ids.clamp(-1, LARGEST_ID) if wide else ids).reshape(-1).to(torch.int32)
    parts = [narrow.new_full((1,), limit), _padded(narrow, length, -1)]
    if gates is not None:
        parts.append(_padded(gates.contiguous().view(torch.int32).reshape(-1), length, 0))
    own = torch.cat(parts).unsqueeze(0)
    return own if world == 1 else distributed.gathered(own, (1,) * world, pg)


def _padded(values: Tensor, length: int, value: float) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - values.shape[0]), value=value)


def _joined(by_rank: Tensor, sizes: Routed) -> Tensor:
    """Return a copy of the slots of all ranks without padding, [M*k].

    Memory of its own is aligned, as kernels and compiled code expect.
    """
    if len(set(sizes.rows)) == 1:
        return by_rank.clone(memory_format=torch.contiguous_format).view(-1)
    pieces = zip(by_rank, sizes.rows, strict=True)
    return torch.cat([piece[: count * sizes.topk] for piece, count in pieces])


def _table(
    ids: Tensor, sizes: Routed, rank: int, status: expert_status.Status | None, whole: Tensor
) -> Tensor:
    """Return the table of a rank: on GPUs by ficco's kernels, which also note faults.

    whole: what all ranks sent; the first column has their capacities.
    """
    if not ids.is_cuda:
        made: Tensor = routing_table(ids, sizes, rank)
        return made
    table = torch.empty(sizes.length(rank), dtype=torch.int32, device=ids.device)
    length = kernels.workspace_size(sizes.slots, sizes.experts, len(sizes.rows))
    rows = kernels.Rows.of(sizes, rank, table)
    faults = None
    if status is not None:
        words, shown, tag = status.words, status.shown, status.tag_of(sizes)
        faults = kernels.Faults(whole, whole.stride(0), words, shown, tag)
    kernels.route(ids.view(-1, sizes.topk), table.new_empty(length), rows, rank, faults)
    return table


def _fault(ids: Tensor, limits: Tensor, sizes: Routed, tag: int) -> list[int]:
    """Return the words of the first wrong id, else of the first rank above its capacity, else 0.

    The words are those of `kernels.experts.Faults`. This is for CPUs; kernels do it on GPUs.
    """
    wrong = torch.nonzero(ids >= sizes.experts * len(sizes.rows))
    if len(wrong):
        slot = int(wrong[0])
        return [WRONG_ID, slot, int(ids[slot]), tag]
    counts = torch.bincount(ids[ids >= 0] // sizes.experts, minlength=len(sizes.rows))
    for rank, (count, limit) in enumerate(zip(counts.tolist(), limits.tolist(), strict=True)):
        if count > limit:
            return [OVERFLOW, rank, count, limit]
    return [0] * 4
