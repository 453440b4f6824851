"""Triton kernels of the ways that are compared: an activation, copies of rows to peers, sums."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["push", "silu_mul", "silu_mul_gradient", "slot_sums"]

BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul(z, h, count, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(count):
        columns = tl.program_id(1) * block + tl.arange(0, block)
        inside = columns < width
        gate = tl.load(z + row * 2 * width + columns, mask=inside).to(tl.float32)
        up = tl.load(z + row * 2 * width + width + columns, mask=inside).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up
        tl.store(h + row * width + columns, value.to(h.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul_gradient(z, dh, dz, count, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(count):
        columns = tl.program_id(1) * block + tl.arange(0, block)
        inside = columns < width
        gate = tl.load(z + row * 2 * width + columns, mask=inside).to(tl.float32)
        up = tl.load(z + row * 2 * width + width + columns, mask=inside).to(tl.float32)
        given = tl.load(dh + row * width + columns, mask=inside).to(tl.float32)
        part = tl.sigmoid(gate)
        dgate = given * up * part * (1 + gate * (1 - part))
        dup = given * gate * part
        tl.store(dz + row * 2 * width + columns, dgate.to(dz.dtype.element_ty), mask=inside)
        tl.store(dz + row * 2 * width + width + columns, dup.to(dz.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _push(x, source, peers, places, addresses, count, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    if row < tl.load(count):
        first = tl.load(source + row).to(tl.int64) * width
        address = tl.load(addresses + tl.load(peers + row))
        to = tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), 16)  # bytes
        to += tl.load(places + row).to(tl.int64) * width
        for start in range(0, width, block):
            columns = start + tl.arange(0, block)
            inside = columns < width
            tl.store(to + columns, tl.load(x + first + columns, mask=inside), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _slot_sums(rows, index, gates, y, width, topk: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    total = tl.zeros((block,), tl.float32)
    for slot in tl.static_range(topk):
        row = tl.load(index + token * topk + slot).to(tl.int64)
        gate = tl.load(gates + token * topk + slot)
        total += gate * tl.load(rows + row * width + columns, mask=inside).to(tl.float32)
    tl.store(y + token * width + columns, total.to(y.dtype.element_ty), mask=inside)


def silu_mul(z: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return silu of the first half of each row, times the second half.

    Args:
        z: [rows, 2 f].
        count: rows that are there, on the device; the others are not touched.
    """
    rows, width = z.shape[0], z.shape[1] // 2
    h = z.new_empty(rows, width)
    if rows:
        _silu_mul[rows, triton.cdiv(width, BLOCK)](z, h, count, width, BLOCK)
    return h


def silu_mul_gradient(z: torch.Tensor, dh: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the argument of `silu_mul`."""
    rows, width = dh.shape
    dz = torch.empty_like(z)
    if rows:
        _silu_mul_gradient[rows, triton.cdiv(width, BLOCK)](z, dh, dz, count, width, BLOCK)
    return dz


def push(x: torch.Tensor, source: Any, peers: Any, places: Any, addresses: Any, count: Any) -> None:
    """Copy rows to peers: row source[i] of x becomes row places[i] at rank peers[i], i < count."""
    if len(source):
        _push[(len(source),)](x, source, peers, places, addresses, count, x.shape[1], BLOCK)


def slot_sums(rows: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Return for each token the sum of the rows index[token] times its gates."""
    (tokens, topk), width = index.shape, rows.shape[1]
    y = rows.new_empty(tokens, width)
    grid = (tokens, triton.cdiv(width, BLOCK))
    _slot_sums[grid](rows, index, gates, y, width, topk, BLOCK)
    return y
