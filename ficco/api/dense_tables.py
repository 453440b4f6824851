"""Gradients of embedding tables: dense by ficco's kernels on GPUs, or by PyTorch; or sparse."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ficco.api.sorted_rows import Looked, can_update, prepare_updates
from ficco.api.table_gradients import Lookups, select_tables
from ficco.core.private.torch_core import bag_gradient
from ficco.kernels import row_updates

Tensor = torch.Tensor


def begin_dense(looked: Looked, like: Tensor) -> Callable[[Tensor], list[Tensor]]:
    """Sort the lookups, and return the function that computes dense gradients.

    Args:
        looked: the lookups of the tables that need a gradient.
        like: [any, dimension], of the dtype and device of the gradients.

    Returns:
        A function of the gradients of bags [batch x all tables, dimension], which returns the
        gradients [height, dimension] of the tables.
    """
    if can_update([like]) and like.shape[1]:
        heights = list(looked.pools.heights)
        whole = like.new_zeros((sum(heights), like.shape[1]))
        tables = list(torch.split(whole, heights))
        if (store := prepare_updates(looked, tables, None, row_updates.STORE)) is not None:
            return lambda bags: tables if store(bags, 0.0, 0.0) else _by_pytorch(looked)(bags)
    return _by_pytorch(looked)


def begin_sparse(looked: Looked) -> Callable[[Tensor], list[Tensor]]:
    """Join the lookups, and return the function that computes sparse gradients.

    Arguments and result are those of `begin_dense`; the gradients are sparse COO tensors, not
    coalesced. A lookup is an index, and its values are the gradient of its bag.
    """
    lookups = Lookups(*looked.pools)
    return lambda bags: lookups.sparse(_of(looked, bags))


def _of(looked: Looked, bags: Tensor) -> Tensor:
    """Return the gradients of the bags of the tables that need a gradient."""
    if len(looked.columns) == looked.across:
        return bags
    return select_tables(bags, looked.columns, looked.across)


def _by_pytorch(looked: Looked) -> Callable[[Tensor], list[Tensor]]:
    lookups = Lookups(*looked.pools)
    keys, height = lookups.keys(), sum(lookups.heights)

    def gradients(bags: Tensor) -> list[Tensor]:
        own = _of(looked, bags)
        # On GPUs PyTorch adds up in float32, but needs factors in the dtype of the gradients.
        sums = own if own.is_cuda and lookups.factors is None else own.float()
        unused = keys.new_empty(0)  # only for modes mean and max
        whole = bag_gradient(
            sums, keys, lookups.rows, unused, unused, height, False, 0, lookups.factors, -1
        )
        return list(torch.split(whole.to(own.dtype), lookups.heights))

    return gradients
