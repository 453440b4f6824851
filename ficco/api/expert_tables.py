"""How ids of experts become a routing table: one collective, then PyTorch functions on the device.

Every rank gets the ids of all ranks, so each makes its table alone, and knows the rows and the
capacity of all others. Nothing here waits for the device.

A table of rank r is int32, for e experts of a rank, k slots of a token, T_r own tokens and M tokens
of all ranks. A slot is the number of a token among all M, times k, plus its place in the token:

    [0:4]        rows; 1 + the first slot with a wrong id, or 0; most rows of a rank; 0
    [4:4+e]      per expert of r, where its rows end in the list
    [..+e]       per expert of r, where those rows end that are of r's own tokens, which come first
    [..+T_r*k]   the ids of r's own tokens
    [..+M*k]     the list: the slots of r's rows, in the order of experts, then of owners (r first),
                 then of slots; -1 behind them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ficco.api import expert_status, groups
from ficco.api.arguments import process_group
from ficco.api.expert_status import OVERFLOW, WRONG_ID
from ficco.core.errors import InputError
from ficco.runtime import distributed
from ficco.runtime.members import rank_in

Tensor = torch.Tensor

HEAD = 4  # words of a table before the ends
_UNLIMITED = 2**31 - 1  # the capacity of a rank that has none yet
_LARGEST = 2**31 - 1  # ids above it become this one, so that they are int32
_agreed: WeakKeyDictionary[Any, set[tuple[int, ...]]] = WeakKeyDictionary()  # of runtimes of GPUs


class Sizes(NamedTuple):
    """The sizes of a routing.

    Attributes:
        rank: this rank.
        rows: tokens of all ranks.
        topk: slots of a token.
        experts: of a rank.
    """

    rank: int
    rows: tuple[int, ...]
    topk: int
    experts: int

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def slots(self) -> int:
        """Slots of all ranks."""
        return sum(self.rows) * self.topk

    @property
    def own(self) -> int:
        """Slots of this rank's tokens."""
        return self.rows[self.rank] * self.topk

    @property
    def first(self) -> int:
        """The first slot of this rank's tokens."""
        return sum(self.rows[: self.rank]) * self.topk

    @property
    def padded(self) -> int:
        """Slots of each rank when they travel: ranks with fewer tokens pad."""
        return max(self.rows) * self.topk

    @property
    def ends(self) -> int:
        """Where the ends begin."""
        return HEAD

    @property
    def ids(self) -> int:
        """Where own ids begin."""
        return HEAD + 2 * self.experts

    @property
    def listed(self) -> int:
        """Where the list of slots begins."""
        return self.ids + self.own

    @property
    def length(self) -> int:
        """Of the table."""
        return self.listed + self.slots


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
    sizes = Sizes(rank, tuple(rows), ids.shape[1], experts // world)
    expert_status.check(pg, None if ids.is_cuda else ids.device)
    _meet(pg, ids, (sizes.topk, experts, int(gates is not None), *sizes.rows))
    limit = _UNLIMITED if capacity is None else capacity
    whole = _exchanged(ids, gates, limit, sizes, pg)
    by_rank = whole[:, 1 : 1 + sizes.padded]
    table, counts = _table(by_rank, sizes)
    if capacity is not None:
        found = _fault(by_rank, whole[:, 0], counts, sizes)
        expert_status.status_of(pg, ids.device).note(found)
    if gates is None:
        return [table]
    return [table, _joined(whole[:, 1 + sizes.padded :], sizes).contiguous().view(torch.float32)]


def return_gates(dgates: Tensor, topk: int, group: Any, rows: Sequence[int]) -> Tensor:
    """Return the sums over ranks of gradients [M*k] of this rank's own slots, [T, k].

    At most one rank has a gradient of a slot that is not zero, so the order of the sum is of no
    consequence.
    """
    pg = process_group(group)
    sizes = Sizes(rank_in(pg), tuple(rows), topk, 1)
    own = (sizes.rows[sizes.rank], topk)
    if sizes.world == 1:
        return dgates.reshape(own).clone()
    if not dgates.is_cuda:
        whole = dgates.contiguous().clone()
        dist.all_reduce(whole, group=pg)
        return whole[sizes.first : sizes.first + sizes.own].reshape(own).clone()
    pieces = torch.split(dgates, [count * topk for count in sizes.rows])
    padded = torch.cat([_padded(piece, sizes.padded, 0.0) for piece in pieces])
    mine = padded.new_empty(sizes.padded)
    distributed.reduce_scatter(mine, padded, group=pg)
    return mine[: sizes.own].reshape(own).clone()


def _meet(pg: Any, ids: Tensor, numbers: tuple[int, ...]) -> None:
    """Compare numbers that all ranks must have, before a collective that would hang otherwise.

    Ranks on the CPU meet in each call, so that a rank learns of a peer that raised an error. Those
    on GPUs meet in the first call with these numbers.

    Raises:
        InputError: numbers differ. EngineError: a peer has failed or does not call.
    """
    if len(numbers) == 4 or groups.disabled():  # one rank
        return
    runtime = groups.gpu_runtime(pg, ids.device) if ids.is_cuda else groups.runtime(pg)
    if runtime is None:
        return
    runtime.check_alive()
    known = _agreed.setdefault(runtime, set())
    if ids.is_cuda and numbers in known:
        return
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
        names = ("slots a token (k)", "experts", "gates (1: given)")
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


def _exchanged(ids: Tensor, gates: Tensor | None, limit: int, sizes: Sizes, pg: Any) -> Tensor:
    """Return per rank: its capacity, its ids and the bits of its gates, padded to one length."""
    wide = ids.dtype == torch.int64
    narrow = (ids.clamp(-1, _LARGEST) if wide else ids).reshape(-1).to(torch.int32)
    parts = [narrow.new_full((1,), limit), _padded(narrow, sizes.padded, -1)]
    if gates is not None:
        bits = gates.contiguous().view(torch.int32).reshape(-1)
        parts.append(_padded(bits, sizes.padded, 0))
    own = torch.cat(parts).unsqueeze(0)
    return own if sizes.world == 1 else distributed.gathered(own, (1,) * sizes.world, pg)


def _padded(values: Tensor, length: int, value: float) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - values.shape[0]), value=value)


def _joined(by_rank: Tensor, sizes: Sizes) -> Tensor:
    """Return the slots of all ranks without padding, [M*k]."""
    if len(set(sizes.rows)) == 1:
        return by_rank.reshape(-1)
    pieces = zip(by_rank, sizes.rows, strict=True)
    return torch.cat([piece[: count * sizes.topk] for piece, count in pieces])


def _table(by_rank: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Return this rank's table, and the rows of each rank."""
    e, world = sizes.experts, sizes.world
    ids = _joined(by_rank, sizes)
    slots = torch.arange(sizes.slots, dtype=torch.int32, device=ids.device)
    wrong = ids >= e * world
    owners = torch.where((ids < 0) | wrong, world, ids // e).long()  # of the experts
    counts = _counted(owners, world + 1)[:world]
    foreign = (slots < sizes.first) | (slots >= sizes.first + sizes.own)
    places = torch.where(owners == sizes.rank, 2 * (ids - sizes.rank * e) + foreign.int(), 2 * e)
    ends = _counted(places.long(), 2 * e + 1)[: 2 * e].cumsum(0)
    needed = ends[-1]
    order = torch.argsort(places, stable=True).int()
    listed = torch.where(slots < needed, order, -1)
    first = torch.where(wrong, slots, _LARGEST).long()
    first = torch.cat([first, first.new_full((1,), _LARGEST)]).min()
    status = torch.where(first == _LARGEST, 0, first + 1)
    head = torch.stack([needed, status, counts.max(), torch.zeros_like(needed)])
    own = ids[sizes.first : sizes.first + sizes.own]
    parts = [head.int(), ends[1::2].int(), ends[::2].int(), own, listed.int()]
    return torch.cat(parts), counts


def _counted(places: Tensor, count: int) -> Tensor:
    """Return how often each number below `count` occurs; bincount would wait for the device."""
    return torch.zeros(count, dtype=torch.int64, device=places.device).scatter_add_(
        0, places, torch.ones_like(places)
    )


def _fault(by_rank: Tensor, limits: Tensor, counts: Tensor, sizes: Sizes) -> Tensor:
    """Return the words of the first wrong id, else of the first rank above its capacity, else 0."""
    ids = by_rank.reshape(-1).long()
    over = (counts > limits).int()
    full = over.argmax()
    kind = torch.full_like(full, OVERFLOW)
    words = torch.stack([kind, full, counts[full], limits[full].long()]) * over.max()
    if not ids.numel():
        return words.int()
    wrong = (ids >= sizes.experts * sizes.world).int()
    at = wrong.argmax()
    token = at % sizes.padded // sizes.topk
    seen = torch.stack([torch.full_like(at, WRONG_ID), at // sizes.padded, token, ids[at]])
    return torch.where(wrong.max() > 0, seen, words).int()
