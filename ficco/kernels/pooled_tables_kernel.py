"""Sums and means of table rows, bag by bag, over all tables in one launch. Device code only.

The work is divided into panels (at most COLS columns of one table) and blocks of BAGS bags.
Programs stride over the blocks of all panels. A block is a matrix [BAGS, COLS] of float32 sums; see
`pooled_block`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import POOL_TABLES
from ficco.kernels.pooled_block import block_sums

__all__ = ["pool_tables"]

# Fields of a panel; `ficco.kernels.pooled_tables` writes them in this order.
_TABLE = tl.constexpr(0)  # address of the first row, at the panel's first column
_TABLE_STRIDE = tl.constexpr(1)  # elements from one row to the next
_WIDTH = tl.constexpr(2)  # columns of the panel
_COLUMN = tl.constexpr(3)  # the target's column of the panel's first column
_INDICES = tl.constexpr(4)  # address
_OFFSETS = tl.constexpr(5)  # address
_ENTRIES = tl.constexpr(6)  # number of offsets
_END = tl.constexpr(7)  # number of indices
_WEIGHTS = tl.constexpr(8)  # address; 0: all weights are 1
_MEAN = tl.constexpr(9)  # 1: means; 0: sums
_FIELDS = tl.constexpr(10)


@triton.jit
def _target_rows(target, target_stride, place, column, BYTES: tl.constexpr):  # noqa: N803
    """Return the address of the panel's first column in the target's row of each bag."""
    return tl.multiple_of(target + place.to(tl.int64) * target_stride + column, BYTES)


@triton.jit(do_not_specialize=POOL_TABLES.unknown)
def pool_tables(  # noqa: PLR0913 - a kernel's arguments are its interface
    target,
    table,
    indices,
    weights,
    panels,
    panel_count: tl.int32,
    first: tl.int32,
    bags: tl.int32,
    target_stride: tl.int64,
    LOOKUPS: tl.constexpr,  # noqa: N803 - Triton's way to mark constants
    BAGS: tl.constexpr,  # noqa: N803
    COLS: tl.constexpr,  # noqa: N803
    EDGE: tl.constexpr,  # noqa: N803
    BYTES: tl.constexpr,  # noqa: N803
    WEIGHTED: tl.constexpr,  # noqa: N803
):
    """Store in row i of target the sums or means of bag first + i of every table.

    table, indices, weights: any arrays of these dtypes; the addresses are in `panels`.
    panels: int64 [panel_count, _FIELDS].
    bags: number of bags, which is the number of rows that are stored.
    EDGE, BYTES: elements that divide strides, widths and columns; bytes that divide the addresses
    of tables and target.
    WEIGHTED: whether any panel has weights.
    """
    col = tl.arange(0, COLS)[None, :]
    items = tl.cdiv(bags, BAGS) * panel_count
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0)):
        panel = panels + (item % panel_count) * _FIELDS
        source = tl.multiple_of(tl.load(panel + _TABLE).to(table.dtype), BYTES)
        stride = tl.multiple_of(tl.load(panel + _TABLE_STRIDE).to(tl.int32), EDGE)
        width = tl.multiple_of(tl.load(panel + _WIDTH).to(tl.int32), EDGE)
        column = tl.multiple_of(tl.load(panel + _COLUMN), EDGE)
        offsets = tl.load(panel + _OFFSETS).to(indices.dtype)
        place = (item // panel_count) * BAGS + tl.arange(0, BAGS)
        bag = first + place
        exists = place < bags
        followed = exists & (bag + 1 < tl.load(panel + _ENTRIES))
        begin = tl.load(offsets + bag, mask=exists, other=0).to(tl.int64)
        end = tl.load(offsets + bag + 1, mask=followed, other=0).to(tl.int64)
        end = tl.where(followed, end, tl.load(panel + _END))
        count = tl.where(exists, end - begin, 0).to(tl.int32)
        own_indices = tl.load(panel + _INDICES).to(indices.dtype) + begin
        weights_at = tl.load(panel + _WEIGHTS)
        own_weights, weighted = weights_at.to(weights.dtype) + begin, weights_at != 0
        total = block_sums(
            source, stride, width, own_indices, own_weights, weighted, count,
            BAGS, COLS, LOOKUPS, WEIGHTED,
        )  # fmt: skip
        if tl.load(panel + _MEAN) != 0:
            total = total / tl.maximum(count, 1).to(tl.float32)[:, None]
        targets = _target_rows(target, target_stride, place, column, BYTES)
        tl.store(
            targets[:, None] + col,
            total.to(target.dtype.element_ty),
            mask=exists[:, None] & (col < width),
        )
