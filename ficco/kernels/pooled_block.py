"""The sums or means of a block: some bags by some columns of one table. Device code only.

A step adds LOOKUPS rows per bag. It also loads the rows of the next step, and the indices of the
one after it. The loop carries both, because the assembler moves loads to their first use where it
can, and then few loads are in flight. A bag's rows are added one by one in the order of its
indices, so the result does not depend on the size of a block.
"""

from __future__ import annotations

from typing import Any  # noqa: F401 - of a comment; Triton reads no annotation

import triton
import triton.language as tl

from ficco.kernels.tuple_arguments import element

__all__ = ["block_sums", "table_sums"]


@triton.jit
def _rows_at(indices, at, count, LOOKUPS: tl.constexpr):
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
    COLS: tl.constexpr,
    LOOKUPS: tl.constexpr,
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
    LOOKUPS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Return the weights of the lookups at, at + 1, ... of each bag, or () if not WEIGHTED."""
    factors = ()  # type: Any
    if WEIGHTED:
        for i in tl.static_range(LOOKUPS):
            factor = tl.load(weights + at + i, mask=weighted & (at + i < count), other=0)
            factors = factors + (tl.where(weighted, factor.to(tl.float32), 1.0),)  # noqa: RUF005
    return factors


@triton.jit
def block_sums(  # noqa: PLR0913
    source,
    stride,
    width,
    indices,
    weights,
    weighted,
    count,
    BAGS: tl.constexpr,
    COLS: tl.constexpr,
    LOOKUPS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Return the sums of a block, float32 [BAGS, COLS].

    source: pointer to the block's first column in the table's first row; stride: int32.
    width: columns of the block; those from there on are 0.
    indices, weights: pointers to the first lookup of each bag, [BAGS].
    weighted: whether this block has weights, if WEIGHTED.
    count: int32 [BAGS], lookups of each bag, 0 or more.
    """
    longest = tl.max(count, axis=0)
    rows = _rows_at(indices, 0, count, LOOKUPS)
    parts = _parts_of(source, rows, stride, 0, count, width, COLS, LOOKUPS)
    factors = _factors_at(weights, weighted, 0, count, LOOKUPS, WEIGHTED)
    rows = _rows_at(indices, LOOKUPS, count, LOOKUPS)
    total = tl.zeros((BAGS, COLS), tl.float32)
    for at in tl.range(0, longest, LOOKUPS):
        for i in tl.static_range(LOOKUPS):
            part = parts[i].to(tl.float32)
            if WEIGHTED:
                part = part * factors[i][:, None]
            total += part
        after = at + LOOKUPS
        parts = _parts_of(source, rows, stride, after, count, width, COLS, LOOKUPS)
        factors = _factors_at(weights, weighted, after, count, LOOKUPS, WEIGHTED)
        rows = _rows_at(indices, after + LOOKUPS, count, LOOKUPS)
    return total


@triton.jit
def table_sums(  # noqa: PLR0913
    tables,
    strides,
    indices,
    offsets,
    ends,
    weights,
    means,
    weighted,
    number,
    left,
    width,
    bag,
    exists,
    batch,
    BAGS: tl.constexpr,
    COLS: tl.constexpr,
    LOOKUPS: tl.constexpr,
    EDGE: tl.constexpr,
    BYTES: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Return the sums or means of bags of one of several tables, float32 [BAGS, COLS].

    tables, strides: pointers to tables, and elements from one row to the next, below 2^31.
    indices, offsets, ends: per table: rows of all bags, the first lookup of each of `batch` bags,
    and the number of lookups, where the last bag ends.
    weights: per table, a factor per lookup; read if WEIGHTED.
    means, weighted: sets of tables, a bit for each.
    number, left, width: the table, and its first column and number of columns in the block.
    bag, exists: [BAGS], the bags, and whether to pool them.
    EDGE, BYTES: elements that divide strides and widths; bytes that divide addresses.
    """
    size: tl.constexpr = tables[0].dtype.element_ty.primitive_bitwidth // 8
    own_offsets = element(offsets, number).to(offsets[0].dtype)
    begin = tl.load(own_offsets + bag, mask=exists, other=0).to(tl.int64)
    followed = exists & (bag + 1 < batch)
    end = tl.load(own_offsets + bag + 1, mask=followed, other=0).to(tl.int64)
    end = tl.where(followed, end, element(ends, number))
    count = tl.where(exists, end - begin, 0).to(tl.int32)
    own_indices = element(indices, number).to(indices[0].dtype) + begin
    source = (element(tables, number) + left * size).to(tables[0].dtype)
    source = tl.multiple_of(source, BYTES)
    stride = tl.multiple_of(element(strides, number).to(tl.int32), EDGE)
    if WEIGHTED:
        own_weights = element(weights, number).to(weights[0].dtype) + begin
        is_weighted = ((weighted >> number) & 1) != 0
    else:
        own_weights, is_weighted = own_indices, True
    total = block_sums(
        source, stride, width, own_indices, own_weights, is_weighted, count,
        BAGS, COLS, LOOKUPS, WEIGHTED,
    )  # fmt: skip
    if ((means >> number) & 1) != 0:
        total = total / tl.maximum(count, 1).to(tl.float32)[:, None]
    return total
