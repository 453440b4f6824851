"""Routing tables: which rows the experts of a rank multiply, and where their results return.

A row is a slot of a token: slot j of token t of rank s has the number (first[s] + t) * topk + j,
where first[s] counts the tokens of the ranks before s. Every place in a window follows from this
number, so no rank needs a count before it stores, and no window can overflow.

The table of rank r is one row of int32, equal to `table` of the expert numbers of all ranks:

    [0]             number of rows, R: slots whose expert is on rank r
    [1]             1 + the first slot of all ranks whose expert does not exist, or 0
    [2]             the largest R of all ranks
    [3]             0
    [4:4+e]         for each of the e experts of rank r, the end of its rows in the list
    [4+e:4+2e]      for each, the end of those of its rows whose token is on rank r
    then            the expert numbers of this rank's slots, T_r * topk
    then            the list: slots of expert 0, 1, ...; for each expert first those of this rank's
                    tokens, then the others, by number; -1 from R on

Arrays are NumPy arrays or PyTorch tensors. This module loads neither library.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ficco.operators.reference import is_tensor, library_of
from ficco.operators.registry import Array

HEADER = 4  # numbers before the ends
MOST_EXPERTS = 1024  # on all ranks
MOST_SLOTS = 2**26  # of all ranks; kernels index with int32, also a count per expert and 128 slots
LARGEST_ID = 2**31 - 1  # ids above it become this one, so that they are int32


class Routed(NamedTuple):
    """The sizes of routing tables, which all ranks know.

    Attributes:
        experts: experts of each rank.
        topk: slots of a token.
        rows: tokens by rank.
    """

    experts: int
    topk: int
    rows: tuple[int, ...]

    @property
    def slots(self) -> int:
        """Slots of all ranks."""
        return sum(self.rows) * self.topk

    def first_slot(self, rank: int) -> int:
        """Return the number of the first slot of a rank; of `world`: the number of slots."""
        return sum(self.rows[:rank]) * self.topk

    def token_of(self, slot: int) -> tuple[int, int]:
        """Return the rank and the token, of those of the rank, that a slot belongs to."""
        token, rank = slot // self.topk, 0
        while token >= self.rows[rank]:
            token, rank = token - self.rows[rank], rank + 1
        return rank, token

    @property
    def own_at(self) -> int:
        """The place of a rank's own expert numbers in its table."""
        return HEADER + 2 * self.experts

    def list_at(self, rank: int) -> int:
        """Return the place of the list in the table of a rank."""
        return self.own_at + self.rows[rank] * self.topk

    def length(self, rank: int) -> int:
        """Return the length of the table of a rank."""
        return self.list_at(rank) + self.slots


class Table(NamedTuple):
    """The parts of a routing table; see the module."""

    needed: Array
    wrong: Array
    ends: Array
    own_ends: Array
    own: Array
    slots: Array


def parts_of(row: Array, sizes: Routed, rank: int) -> Table:
    """Return the parts of a table of one dimension, as views."""
    e, own, first = sizes.experts, sizes.own_at, sizes.list_at(rank)
    ends, own_ends = row[HEADER : HEADER + e], row[HEADER + e : own]
    return Table(row[0], row[1], ends, own_ends, row[own:first], row[first : sizes.length(rank)])


def table(ids: Array, sizes: Routed, rank: int) -> Array:
    """Return the routing table of a rank.

    Args:
        ids: expert numbers of all slots, of integers, one dimension: 0 to experts * ranks - 1;
            below 0: the slot has no expert.
        sizes: of the table.
        rank: 0 to the number of ranks - 1.

    Returns:
        [length] of int32. Nothing here waits for a device.
    """
    library, e, world = library_of(ids), sizes.experts, len(sizes.rows)
    ids = _as(ids, "int64")
    number = _counted(ids, len(ids))
    begin, end = sizes.first_slot(rank), sizes.first_slot(rank + 1)
    local, last = ids - rank * e, 2 * e
    others = _as((number < begin) | (number >= end), "int64")
    keys = library.where((local >= 0) & (local < e), 2 * local + others, last)
    counts = library.bincount(keys, minlength=last + 1)[:last]
    ends = counts.cumsum(0)
    order = keys.argsort(stable=True) if is_tensor(ids) else keys.argsort(kind="stable")
    needed = ends[last - 1]
    slots = library.where(number < needed, order, -1)
    exists = (ids >= 0) & (ids < world * e)
    per_rank = library.bincount(library.where(exists, ids // e, world), minlength=world + 1)
    wrong = library.where(ids >= world * e, number, len(ids))
    first_wrong = wrong.min() if len(ids) else _counted(ids, 1)[0]
    status = library.where(first_wrong < len(ids), first_wrong + 1, 0)
    header = library.stack([needed, _as(status, "int64"), per_rank[:world].max(), 0 * needed])
    parts = [header, ends[1::2], ends[0::2], ids[begin:end], slots]
    return _as(library.concatenate(parts), "int32")


def _as(array: Array, dtype: str) -> Array:
    if is_tensor(array):
        return array.to(getattr(library_of(array), dtype))
    return array.astype(dtype)


def _counted(like: Array, count: int) -> Array:
    """Return 0, 1, ... on the device of `like`."""
    library: Any = library_of(like)
    if is_tensor(like):
        return library.arange(count, device=like.device)
    return library.arange(count)
