"""Gradients of a rank's embedding tables, from those of their bags: dense, or sparse.

All tables are served at once: their lookups form one list, table by table. Nothing here waits for
the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ficco.core.private.torch_core import sample_gradient

Tensor = torch.Tensor

# Lookups whose rows are copied at once. On GPUs PyTorch has no kernel without copies for bfloat16.
_AT_ONCE = 1 << 18


def packed(dy: Tensor, counts: Sequence[int], dimension: int) -> Tensor:
    """Return the gradients of pooled bags in the order in which ranks receive them.

    Args:
        dy: [bags, all tables x dimension].
        counts: number of tables by rank.
        dimension: columns of a table.

    Returns:
        [bags x all tables, dimension]: for each rank its tables' columns of all bags, bag by bag.
    """
    bags, world = dy.shape[0], len(counts)
    if len(set(counts)) == 1:
        by_rank = dy.reshape(bags, world, counts[0] * dimension).transpose(0, 1)
        return by_rank.contiguous().view(bags * sum(counts), dimension)
    target = dy.new_empty(bags * sum(counts), dimension)
    columns = torch.split(dy, [count * dimension for count in counts], dim=1)
    blocks = torch.split(target, [bags * count for count in counts])
    for part, rows in zip(columns, blocks, strict=True):
        rows.view(part.shape).copy_(part)
    return target


def select_tables(bags: Tensor, places: Sequence[int], count: int) -> Tensor:
    """Return the gradients of bags of some tables, from those of all `count` tables of a rank."""
    by_table = bags.view(-1, count, bags.shape[1])
    chosen = torch.cat([by_table[:, i : i + 1] for i in places], dim=1)
    return chosen.view(-1, bags.shape[1])


class Pools(NamedTuple):
    """How the bags of some tables are pooled.

    Attributes:
        indices: per table [lookups], int32 or int64.
        starts: per table [batch], of this dtype: the first lookup of each bag.
        heights: rows of each table.
        modes: per table, one of `problem.MODES`.
        weights: by the places of weighted tables, float32 [lookups].
    """

    indices: Sequence[Tensor]
    starts: Sequence[Tensor]
    heights: Sequence[int]
    modes: Sequence[str]
    weights: Mapping[int, Tensor]

    def of(self, places: Sequence[int]) -> Pools:
        """Return those of the tables at some places, in this order."""
        return Pools(
            [self.indices[i] for i in places],
            [self.starts[i] for i in places],
            [self.heights[i] for i in places],
            [self.modes[i] for i in places],
            {new: self.weights[i] for new, i in enumerate(places) if i in self.weights},
        )


def factors_of(pools: Pools, bags: Sequence[Tensor]) -> Tensor | None:
    """Return what the gradient of each lookup's bag is multiplied with, float32 [all lookups].

    Args:
        pools: of the tables, with a bag at least.
        bags: per table [lookups], the number of the bag of each lookup, int32 or int64.

    Returns:
        The factors, table by table; None if all are 1.
    """
    if not set(pools.modes) - {"sum"}:
        return None
    found = []
    for place, (mode, start, own) in enumerate(zip(pools.modes, pools.starts, bags, strict=True)):
        if mode == "weighted":
            found.append(pools.weights[place].float())
        elif mode == "mean":
            sizes = torch.diff(start, append=start.new_full((1,), len(own)))
            found.append(sizes.float().reciprocal()[own])
        else:
            found.append(torch.ones_like(own, dtype=torch.float32))
    return torch.cat(found)


class Lookups:
    """The lookups of some tables.

    Args:
        indices: per table [lookups], of one table or more.
        starts: per table [batch]: the first lookup of each bag.
        heights: rows of each table.
        modes: see `Pools`; (): all are sums.
        weights: see `Pools`.

    Attributes:
        indices: per table [lookups], int64; empty if there are no bags.
        heights: rows of each table.
        rows: [all lookups]: the row of the lookup's bag in the gradients of bags [batch x tables,
            dimension].
        factors: [all lookups], float32: what the gradient of the lookup's bag is multiplied with;
            None: all are 1.
    """

    def __init__(
        self,
        indices: Sequence[Tensor],
        starts: Sequence[Tensor],
        heights: Sequence[int],
        modes: Sequence[str] = (),
        weights: Mapping[int, Tensor] | None = None,
    ) -> None:
        batch = starts[0].shape[0]
        self.heights = list(heights)
        self.indices = [index.long() if batch else index[:0].long() for index in indices]
        first, edges = 0, []
        for index, start in zip(self.indices, starts, strict=True):
            edges.append(start.long() + first)
            first += index.shape[0]
        places, begins = torch.arange(first, device=indices[0].device), torch.cat(edges)
        bags = torch.searchsorted(begins, places, right=True) - 1  # of all tables
        self.factors = None
        if batch and set(modes) - {"sum"}:
            pools = Pools(self.indices, starts, heights, modes, weights or {})
            owns = torch.split(bags % batch, [len(index) for index in self.indices])
            self.factors = factors_of(pools, owns)
        if batch:
            bags = bags % batch * len(indices) + bags // batch
        self.rows = bags

    def keys(self) -> Tensor:
        """Return the lookups as rows of the tables, stacked one below the other."""
        above, keys = 0, []
        for index, height in zip(self.indices, self.heights, strict=True):
            keys.append(index + above)
            above += height
        return torch.cat(keys)

    def sparse(self, bags: Tensor) -> list[Tensor]:
        """Return the gradients of the tables as sparse COO tensors, not coalesced.

        A lookup is an index, and its values are the gradient of its bag, times its factor.
        """
        counts = [len(index) for index in self.indices]
        of_lookups = bags.index_select(0, self.rows)
        if self.factors is not None:
            of_lookups = (of_lookups * self.factors.unsqueeze(1)).to(bags.dtype)
        values = torch.split(of_lookups, counts)
        return [
            torch.sparse_coo_tensor(
                index.unsqueeze(0), some, (height, bags.shape[1]), check_invariants=False,
                is_coalesced=False,
            )
            for index, some, height in zip(self.indices, values, self.heights, strict=True)
        ]  # fmt: skip


def weight_gradients(
    bags: Tensor, pools: Pools, tables: Mapping[int, Tensor | None]
) -> dict[int, Tensor]:
    """Return the gradients of weights, float32 [lookups], by the places of their tables.

    The gradient of a weight is the product of its table's row and the gradient of its bag; it is
    computed in the dtype of the tables, or in float32.

    Args:
        bags: gradients of bags [batch x tables, dimension].
        pools: of all tables.
        tables: by place, [height, dimension]; None where the weights need no gradient.
    """
    read = {place: table for place, table in tables.items() if table is not None}
    if not read:
        return {}
    if not len(pools.starts[0]):  # no lookup is in a bag
        return {place: torch.zeros_like(pools.weights[place]) for place in read}
    places, count = list(read), len(pools.indices)
    some = pools.of(places)
    lookups, found = Lookups(some.indices, some.starts, some.heights), {}
    bags = bags if len(places) == count else select_tables(bags, places, count)
    rows = torch.split(lookups.rows, [len(index) for index in lookups.indices])
    for place, index, own in zip(places, lookups.indices, rows, strict=True):
        found[place] = _products(read[place], index, bags, own)
    return found


def _products(table: Tensor, index: Tensor, bags: Tensor, rows: Tensor) -> Tensor:
    """Return the product of a row of the table and one of `bags` for each lookup, float32."""
    if not (table.is_cuda and table.dtype == torch.bfloat16):
        unused = index.new_empty(0)
        products: Tensor = sample_gradient(bags, table, index, unused, rows, 0, -1)
        return products.float()
    parts = zip(torch.split(index, _AT_ONCE), torch.split(rows, _AT_ONCE), strict=True)
    found = [
        (table.index_select(0, some).float() * bags.index_select(0, own).float()).sum(1)
        for some, own in parts
    ]
    return torch.cat(found) if found else index.new_empty(0, dtype=torch.float32)
