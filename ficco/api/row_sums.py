"""Sums of gradients by row of a table: by a stable sort and sums of segments, without atomics.

Equal inputs give equal bits. Nothing waits for the device, so the number of rows that were looked
up is unknown: there is a slot for each row that could be, and unused slots have zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import embedding_bag

from ficco.api.table_gradients import Lookups

MOST_LOOKUPS = 1024  # of one sum; more are added up in two steps, as one step adds one by one
_MOST_INT32 = torch.iinfo(torch.int32).max

Tensor = torch.Tensor


class RowSums:
    """Segments of equal rows in the sorted lookups of some tables, and a slot for each segment.

    A segment of more than MOST_LOOKUPS lookups is cut at multiples of it. Its first part has the
    slot of the row; slots of the other parts have zeros in the end.

    Args:
        lookups: the lookups, one at least.

    Attributes:
        sizes: slots of each table.
        rows: [slots]: the row of each slot. An unused slot has any row; its sum is zero.
    """

    def __init__(self, lookups: Lookups) -> None:
        keys = lookups.keys()
        if sum(lookups.heights) <= _MOST_INT32:
            keys = keys.int()  # which takes less time to sort
        self._keys, order = torch.sort(keys, stable=True)
        self._bags = lookups.rows[order]
        self._factors = None if lookups.factors is None else lookups.factors[order]
        counts = [len(index) for index in lookups.indices]
        total = len(keys)
        self._first = torch.ones_like(keys, dtype=torch.bool)  # of a row's lookups
        self._first[1:] = self._keys[1:] != self._keys[:-1]
        begins = self._first.clone()
        begins[::MOST_LOOKUPS] = True
        part = begins.cumsum(0)
        slots = _slots(counts, lookups.heights, part)
        self.sizes = [len(each) for each in slots.places]
        ids, past = torch.cat(slots.first) + torch.cat(slots.places), torch.cat(slots.past)
        self._starts = torch.searchsorted(part, torch.minimum(ids, past))
        at = self._starts.clamp(max=total - 1)
        used = (ids < past) & self._first[at]
        # Many additions of zero to one row would wait for each other.
        self.rows = torch.where(
            used, torch.cat(lookups.indices)[order[at]], torch.cat(slots.spread)
        )

    def of(self, bags: Tensor) -> Tensor:
        """Return the sums [slots, dimension] in float32.

        Args:
            bags: gradients of bags [batch x tables, dimension].
        """
        sums = embedding_bag(
            self._bags, bags.float(), self._starts, mode="sum", per_sample_weights=self._factors
        )
        if len(self._keys) > MOST_LOOKUPS:
            self._join_parts(sums)
        return sums

    def _join_parts(self, sums: Tensor) -> None:
        """Add the sums of later parts of a row to the row's slot, and set theirs to zero.

        Later parts begin at multiples of MOST_LOOKUPS. There are few of these.
        """
        keys = self._keys[::MOST_LOOKUPS]
        slots = self._slot_of(torch.arange(len(keys), device=keys.device) * MOST_LOOKUPS)
        later = ~self._first[::MOST_LOOKUPS].unsqueeze(1)
        found = sums[slots]
        sums.index_copy_(0, slots, found.masked_fill(later, 0))
        begins = torch.ones_like(keys, dtype=torch.bool)
        begins[1:] = keys[1:] != keys[:-1]
        run = begins.cumsum(0)
        starts = torch.searchsorted(run, run + (~begins).long())  # empty where no run begins
        places = torch.arange(len(keys), device=keys.device)
        more = embedding_bag(places, found.masked_fill(~later, 0), starts, mode="sum")
        # The sums that meet in a slot are those of one run and zeros.
        sums.index_add_(0, self._slot_of(torch.searchsorted(self._keys, keys.contiguous())), more)

    def _slot_of(self, places: Tensor) -> Tensor:
        """Return the slots of parts, from the places of their first lookups."""
        return torch.searchsorted(self._starts, places, right=True) - 1


class _Slots(NamedTuple):
    """By table, a tensor with an entry for each of its slots.

    Attributes:
        places: the slot's place among those of the table.
        first: the number of the table's first part.
        past: the number past the table's last part.
        spread: a row of the table; equal ones are far apart.
    """

    places: list[Tensor]
    first: list[Tensor]
    past: list[Tensor]
    spread: list[Tensor]


def _slots(counts: Sequence[int], heights: Sequence[int], part: Tensor) -> _Slots:
    """Return the slots of the tables.

    Args:
        counts: lookups of each table.
        heights: rows of each table.
        part: [all lookups]: the number of the part of each sorted lookup, from 1 on.
    """
    numbers, end, begin = torch.arange(max(counts), device=part.device), part[-1:] + 1, 0
    slots = _Slots([], [], [], [])
    for count, height in zip(counts, heights, strict=True):
        after = begin + count
        cuts = -(-after // MOST_LOOKUPS) + -begin // MOST_LOOKUPS  # multiples in the table's range
        size = min(count, height + cuts)
        places = numbers[:size]
        slots.places.append(places)
        slots.first.append(part[begin : begin + 1].expand(size) if size else places)
        slots.past.append((part[after : after + 1] if after < len(part) else end).expand(size))
        slots.spread.append(places if size <= height else places % height)
        begin = after
    return slots
