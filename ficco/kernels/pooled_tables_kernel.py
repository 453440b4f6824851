"""Sums and means of table rows, bag by bag, over all tables in one launch. Device code only.

The work is divided into panels (at most COLS columns of one table) and blocks of BAGS bags.
Programs stride over the blocks of all panels. A block is a matrix [BAGS, COLS] of float32 sums. A
step adds LOOKUPS rows per bag. It also loads the rows of the next step, and the indices of the one
after it. The loop carries both, because the assembler moves loads to their first use where it can,
and then few loads are in flight. A bag's rows are added one by one in the order of its indices, so
the result does not depend on the grid or on the size of a block.
"""

from __future__ import annotations

from typing import Any  # noqa: F401 - of a comment; Triton reads no annotation

import triton
import triton.language as tl

from ficco.kernels.declarations import POOL_TABLES

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
def _rows_at(indices, at, count, LOOKUPS: tl.constexpr):  # noqa: N803 - Triton's way
    """Return the rows of the lookups at, at + 1, ... of each bag; 0 past its last lookup.

    They are int32, which takes half the registers of int64 indices.
    """
    rows = ()  # type: Any
    for i in tl.static_range(LOOKUPS):
        row = tl.load(indices + at + i, mask=at + i < count, other=0).to(tl.int32)
        rows = rows + (row,)  # noqa: RUF005 - Triton's way
    return rows


@triton.jit
def _parts_of(
    source,
    rows,
    stride,
    at,
    count,
    width,
    COLS: tl.constexpr,  # noqa: N803
    LOOKUPS: tl.constexpr,  # noqa: N803
):
    """Return the panel's columns of the rows of the lookups at, at + 1, ...; 0 past the last."""
    col = tl.arange(0, COLS)[None, :]
    parts = ()  # type: Any
    for i in tl.static_range(LOOKUPS):
        inside = (at + i < count)[:, None] & (col < width)
        there = source + rows[i].to(tl.int64)[:, None] * stride.to(tl.int64) + col
        parts = parts + (tl.load(there, mask=inside, other=0),)  # noqa: RUF005
    return parts


@triton.jit
def _factors_at(
    weights,
    weighted,
    at,
    count,
    LOOKUPS: tl.constexpr,  # noqa: N803
    WEIGHTED: tl.constexpr,  # noqa: N803
):
    """Return the weights of the lookups at, at + 1, ... of each bag, or () if not WEIGHTED."""
    factors = ()  # type: Any
    if WEIGHTED:
        for i in tl.static_range(LOOKUPS):
            factor = tl.load(weights + at + i, mask=weighted & (at + i < count), other=0)
            factors = factors + (tl.where(weighted, factor.to(tl.float32), 1.0),)  # noqa: RUF005
    return factors


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
        longest = tl.max(count, axis=0)
        own_indices = tl.load(panel + _INDICES).to(indices.dtype) + begin
        weights_at = tl.load(panel + _WEIGHTS)
        own_weights, weighted = weights_at.to(weights.dtype) + begin, weights_at != 0
        rows = _rows_at(own_indices, 0, count, LOOKUPS)
        parts = _parts_of(source, rows, stride, 0, count, width, COLS, LOOKUPS)
        factors = _factors_at(own_weights, weighted, 0, count, LOOKUPS, WEIGHTED)
        rows = _rows_at(own_indices, LOOKUPS, count, LOOKUPS)
        total = tl.zeros((BAGS, COLS), tl.float32)
        for at in tl.range(0, longest, LOOKUPS):
            for i in tl.static_range(LOOKUPS):
                part = parts[i].to(tl.float32)
                if WEIGHTED:
                    part = part * factors[i][:, None]
                total += part
            after = at + LOOKUPS
            parts = _parts_of(source, rows, stride, after, count, width, COLS, LOOKUPS)
            factors = _factors_at(own_weights, weighted, after, count, LOOKUPS, WEIGHTED)
            rows = _rows_at(own_indices, after + LOOKUPS, count, LOOKUPS)
        if tl.load(panel + _MEAN) != 0:
            total = total / tl.maximum(count, 1).to(tl.float32)[:, None]
        targets = _target_rows(target, target_stride, place, column, BYTES)
        tl.store(
            targets[:, None] + col,
            total.to(target.dtype.element_ty),
            mask=exists[:, None] & (col < width),
        )
