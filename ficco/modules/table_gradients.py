"""Gradients of a rank's embedding tables, from those of their bags: dense, or sparse.

All tables are served at once: their lookups form one list, table by table. Nothing here waits for
the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Lookups", "packed", "select_tables"]

Tensor = torch.Tensor


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


class Lookups:
    """The lookups of some tables.

    Args:
        indices: per table [lookups].
        starts: per table [batch]: the first lookup of each bag.
        heights: rows of each table.

    Attributes:
        indices: as above; empty if there are no bags.
        heights: as above.
        rows: [all lookups]: the row of the lookup's bag in the gradients of bags [batch x tables,
            dimension].
    """

    def __init__(
        self, indices: Sequence[Tensor], starts: Sequence[Tensor], heights: Sequence[int]
    ) -> None:
        batch = starts[0].shape[0]
        self.heights = list(heights)
        self.indices = list(indices) if batch else [index[:0] for index in indices]
        first, edges = 0, []
        for index, start in zip(self.indices, starts, strict=True):
            edges.append(start + first)
            first += index.shape[0]
        places = torch.arange(first, device=indices[0].device)
        bags = torch.searchsorted(torch.cat(edges), places, right=True) - 1  # of all tables
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

        A lookup is an index, and its values are the gradient of its bag.
        """
        counts = [len(index) for index in self.indices]
        values = torch.split(bags.index_select(0, self.rows), counts)
        return [
            torch.sparse_coo_tensor(
                index.unsqueeze(0), some, (height, bags.shape[1]), check_invariants=False,
                is_coalesced=False,
            )
            for index, some, height in zip(self.indices, values, self.heights, strict=True)
        ]  # fmt: skip
