"""Collectives of torch.distributed under one name in all releases, and for uneven rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def _named(*names: str) -> Any:
    """Return the first of these functions that torch.distributed has.

    PyTorch 2.13 renames collectives of one tensor and warns about the old names, which are the only
    ones in earlier releases.
    """
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


all_gather = _named("all_gather_single", "all_gather_into_tensor")  # (whole, piece, group=None)
reduce_scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")  # (piece, whole, ...)


def gathered(own: torch.Tensor, rows: Sequence[int], group: Any) -> torch.Tensor:
    """Return the rows of all ranks; `rows` is the number per rank. Uneven rows are padded."""
    if not own.is_cuda or len(set(rows)) > 1:
        return torch.cat(_gather(own, rows, group))
    whole = own.new_empty((sum(rows), own.shape[1]))
    all_gather(whole, own.contiguous(), group=group)
    return whole


def _gather(own: torch.Tensor, rows: Sequence[int], group: Any) -> list[torch.Tensor]:
    padded = own.new_zeros((max(rows), own.shape[1]))
    padded[: own.shape[0]] = own
    pieces = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(pieces, padded, group=group)
    return [piece[:count] for piece, count in zip(pieces, rows, strict=True)]


def exchange(
    own: torch.Tensor, splits: Sequence[Sequence[int]], group: Any, rank: int
) -> torch.Tensor:
    """Send splits[rank][r] rows to every rank r; return the received rows by source rank."""
    source, target, sizes_in, sizes_out = _sides(own, splits, rank)
    dist.all_to_all_single(target, source, sizes_in, sizes_out, group=group)
    return target


def begin_exchange(
    own: torch.Tensor, splits: Sequence[Sequence[int]], group: Any, rank: int
) -> Callable[[], torch.Tensor]:
    """Begin `exchange`, on a GPU on a stream of the group; return a function that ends it.

    The function returns the rows. On a GPU it makes the current stream wait, not the host.
    """
    source, target, sizes_in, sizes_out = _sides(own, splits, rank)
    work = dist.all_to_all_single(target, source, sizes_in, sizes_out, group=group, async_op=True)

    def end() -> torch.Tensor:
        work.wait()
        return target

    return end


def _sides(
    own: torch.Tensor, splits: Sequence[Sequence[int]], rank: int
) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """Return the source and the target of an exchange, and the rows from and to each rank."""
    sizes_in, sizes_out = [row[rank] for row in splits], list(splits[rank])
    target = own.new_empty((sum(sizes_in), own.shape[1]))
    if len({size for row in splits for size in row}) == 1:
        sizes_in, sizes_out = [], []  # all are equal
    return own.contiguous(), target, sizes_in, sizes_out
