"""Rows of tables that were looked up, sorted on a GPU, and updates of them by ficco's kernels.

`row_sums` and `dense_tables` do the same with PyTorch's functions, on CPUs and where the kernels
cannot run.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from ficco.api.routes import is_observed
from ficco.api.table_gradients import Pools, factors_of
from ficco.core.errors import EngineError
from ficco.kernels import row_updates
from ficco.kernels.arrays import library_of

Tensor = torch.Tensor
Update = Callable[[Tensor, float | Tensor, float], bool]

_MOST_KEYS = torch.iinfo(torch.int32).max
_log = logging.getLogger("ficco")


class Looked(NamedTuple):
    """The lookups of some of a call's tables.

    Attributes:
        pools: of these tables.
        columns: per table, its place among all tables of the gradients of bags.
        across: number of all tables of the gradients of bags.
    """

    pools: Pools
    columns: Sequence[int]
    across: int


@functools.cache
def _warn_without_kernels(reason: str) -> None:
    """Log once why PyTorch adds up the gradients of rows."""
    _log.warning("PyTorch adds up gradients of table rows, which takes longer: %s", reason)


def can_update(tables: Sequence[Tensor]) -> bool:
    """Return whether the kernels can update the rows of these tables.

    They need adjacent columns, and tables that share no memory: a row is read and written once.
    There are none for AMD GPUs.
    """
    if (
        torch.version.hip is not None
        or is_observed()
        or not all(table.is_cuda and table.stride(1) == 1 for table in tables)
    ):
        return False
    ranges = sorted([_bytes_of(table) for table in tables if table.numel()])
    return all(end <= begin for (_, end), (begin, _) in pairwise(ranges))


def _bytes_of(table: Tensor) -> tuple[int, int]:
    """Return the addresses of a table's first byte, and of the one past its last."""
    begin = table.data_ptr()
    elements = (table.shape[0] - 1) * table.stride(0) + table.shape[1]
    return begin, begin + elements * table.element_size()


def prepare_updates(
    looked: Looked, tables: Sequence[Tensor], accumulators: Sequence[Tensor] | None, kind: int
) -> Update | None:
    """Sort the lookups; return a function that updates the tables by kernels.

    Args:
        looked: the lookups of the tables.
        tables: see `can_update`; at least one.
        accumulators: per table, of Adagrad; None for other kinds.
        kind: of `row_updates.update`.

    Returns:
        A function of the gradients of bags [batch x all tables, dimension], the learning rate, and
        Adagrad's epsilon, which returns whether it has updated the tables. None, or False before a
        table is changed: a kernel is not in the pack and cannot be compiled, or there are too many
        rows, lookups or bags; a warning says so.
    """
    heights = [table.shape[0] for table in tables]
    try:
        if max(heights) > _MOST_KEYS:
            raise EngineError(f"a table has more than {_MOST_KEYS} rows, the most for kernels")
        found = [
            segments
            for first, last in _groups(heights)
            if (segments := _segments(looked, tables, accumulators, range(first, last)))
        ]
    except EngineError as reason:
        _warn_without_kernels(str(reason))
        return None

    def update(bags: Tensor, rate: float | Tensor, epsilon: float) -> bool:
        given = rate.float() if isinstance(rate, Tensor) else rate
        try:
            updates = [row_updates.update(each, bags, kind, given, epsilon) for each in found]
        except EngineError as reason:
            _warn_without_kernels(str(reason))
            return False
        for enqueue in updates:
            enqueue()
        torch.autograd.graph.increment_version([*tables, *(accumulators or ())])
        return True

    return update


def _groups(heights: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first table and the one past the last of each group that a launch takes."""
    first, rows = 0, 0
    for i, height in enumerate(heights):
        if i > first and (i - first == row_updates.MOST_TABLES or rows + height > _MOST_KEYS):
            yield first, i
            first, rows = i, 0
        rows += height
    yield first, len(heights)


def _segments(
    looked: Looked,
    tables: Sequence[Tensor],
    accumulators: Sequence[Tensor] | None,
    chosen: range,
) -> row_updates.Segments | None:
    """Sort the lookups of some tables by row; None if there are none."""
    arrays, pools = library_of(tables[0].device), looked.pools
    lists, targets, first = [], [], 0
    for i in chosen:
        lists.append(
            row_updates.TableLookups(
                pools.indices[i].contiguous(),
                pools.starts[i].contiguous(),
                first,
                looked.columns[i],
            )
        )
        totals = None if accumulators is None else accumulators[i]
        targets.append(row_updates.Target(tables[i].detach(), first, totals))
        first += tables[i].shape[0]
    batch = pools.starts[0].shape[0]
    if not batch or not any(each.indices.shape[0] for each in lists):
        return None
    keys, bags = row_updates.list_lookups(lists, batch, looked.across, arrays)
    ordered, order = torch.sort(keys, stable=True)
    owns = torch.split(bags // looked.across, [each.indices.shape[0] for each in lists])
    factors = factors_of(pools.of(chosen), owns) if any(m != "sum" for m in pools.modes) else None
    return row_updates.find_segments(
        row_updates.SortedLookups(ordered, order, bags, factors), targets, arrays
    )
