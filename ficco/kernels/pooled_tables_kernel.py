"""Sums and means of table rows, bag by bag, over all tables in one launch. Device code only.

The work is divided into panels (at most COLS columns of one table) and blocks of BAGS bags.
Programs stride over the blocks of all panels. A block is a matrix [BAGS, COLS] of float32 sums; see
`pooled_block`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ficco.kernels.declarations import POOL_TABLES
from ficco.kernels.pooled_block import table_sums

__all__ = ["pool_tables"]

# Fields of a panel; `ficco.kernels.pooled_tables` writes them in this order.
_NUMBER = tl.constexpr(0)  # of the table
_LEFT = tl.constexpr(1)  # the panel's first column in the table
_WIDTH = tl.constexpr(2)  # columns of the panel
_COLUMN = tl.constexpr(3)  # the target's column of the panel's first column
_FIELDS = tl.constexpr(4)


@triton.jit
def _target_rows(target, target_stride, place, column, BYTES: tl.constexpr):
    """Return the address of the panel's first column in the target's row of each bag."""
    return tl.multiple_of(target + place.to(tl.int64) * target_stride + column, BYTES)


@triton.jit(do_not_specialize=POOL_TABLES.unknown)
def pool_tables(  # noqa: PLR0913 - a kernel's arguments are its interface
    target,
    tables,
    strides,
    indices,
    offsets,
    ends,
    weights,
    panels,
    panel_count: tl.int32,
    first: tl.int32,
    bags: tl.int32,
    batch: tl.int32,
    means: tl.int64,
    weighted: tl.int64,
    target_stride: tl.int64,
    LOOKUPS: tl.constexpr,
    BAGS: tl.constexpr,
    COLS: tl.constexpr,
    EDGE: tl.constexpr,
    BYTES: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Store in row i of target the sums or means of bag first + i of every table.

    tables, strides, indices, offsets, ends, weights, batch, means, weighted, EDGE, BYTES, WEIGHTED:
    see `table_sums`. Elements of the tuples that no panel names are not used.
    panels: int32 [panel_count, _FIELDS].
    bags: number of bags, which is the number of rows that are stored.
    """
    col = tl.arange(0, COLS)[None, :]
    items = tl.cdiv(bags, BAGS) * panel_count
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0)):
        panel = panels + (item % panel_count) * _FIELDS
        number = tl.load(panel + _NUMBER)
        left = tl.multiple_of(tl.load(panel + _LEFT), COLS)
        width = tl.multiple_of(tl.load(panel + _WIDTH), EDGE)
        column = tl.multiple_of(tl.load(panel + _COLUMN), EDGE)
        place = (item // panel_count) * BAGS + tl.arange(0, BAGS)
        exists = place < bags
        total = table_sums(
            tables, strides, indices, offsets, ends, weights, means, weighted, number, left, width,
            first + place, exists, batch, BAGS, COLS, LOOKUPS, EDGE, BYTES, WEIGHTED,
        )  # fmt: skip
        targets = _target_rows(target, target_stride, place, column, BYTES)
        tl.store(
            targets[:, None] + col,
            total.to(target.dtype.element_ty),
            mask=exists[:, None] & (col < width),
        )
