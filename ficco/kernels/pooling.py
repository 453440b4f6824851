"""Sums of table rows, bag by bag, in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["pool_bags"]

_LOOKUPS = 8  # rows read at once
_MOST_COLS = 256


@triton.jit
def _pool(  # noqa: PLR0913 - a kernel's arguments are its interface
    target,
    table,
    indices,
    offsets,
    first,
    batch,
    lookups,
    dim,
    table_stride,
    target_stride,
    LOOKUPS: tl.constexpr,  # noqa: N803 - Triton's way to mark constants
    COLS: tl.constexpr,  # noqa: N803
):
    place = tl.program_id(0)
    bag = first + place
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    begin = tl.load(offsets + bag)
    end = tl.load(offsets + bag + 1, mask=bag + 1 < batch, other=lookups)
    total = tl.zeros((COLS,), tl.float32)
    at = begin
    while at < end:
        each = at + tl.arange(0, LOOKUPS)
        row = tl.load(indices + each, mask=each < end, other=0)
        inside = (each < end)[:, None] & (col < dim)[None, :]
        rows = tl.load(table + row[:, None] * table_stride + col[None, :], mask=inside, other=0)
        total += tl.sum(rows.to(tl.float32), axis=0)
        at += LOOKUPS
    tl.store(
        target + place.to(tl.int64) * target_stride + col,
        total.to(target.dtype.element_ty),
        mask=col < dim,
    )


def pool_bags(
    table: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    bags: tuple[int, int],
    target: torch.Tensor,
) -> None:
    """Put the sums of some bags into the target, a row each, on the current stream.

    Args:
        table: [rows, dim], unit stride along rows.
        indices: [lookups], int64.
        offsets: [batch], int64: where each bag begins; the last one runs to the end.
        bags: the first bag, and the one past the last.
        target: [bags, dim] in the dtype to round to.
    """
    first, last = bags
    count, dim = last - first, table.shape[1]
    if not count or not dim:
        return
    cols = min(triton.next_power_of_2(dim), _MOST_COLS)
    _pool[count, triton.cdiv(dim, cols)](
        target, table, indices, offsets, first, offsets.numel(), indices.numel(), dim,
        table.stride(0), target.stride(0), LOOKUPS=_LOOKUPS, COLS=cols, num_warps=2,
    )  # fmt: skip
