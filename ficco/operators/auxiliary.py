"""Functions of PyTorch that only gradients call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ficco.operators.functions import join, split
from ficco.operators.registry import Array, Function


def _exchanged_shape(
    ranks: Callable[[str], tuple[int, int]], x: Array, splits: Sequence[int], group: str
) -> Array:
    rank, world = ranks(group)
    return x.new_empty((sum(splits[rank::world]), x.shape[1]))


def _token_shape(ranks: Any, x: Array) -> Array:
    return x.new_zeros(1)


EXCHANGE_ROWS = Function(
    name="exchange_rows",
    schema="(Tensor x, SymInt[] splits, str group) -> Tensor",
    shapes=_exchanged_shape,
    flat=split(1),
    nested=join,
    group_at=-1,
)
"""Sends every rank its block of rows, by one collective."""

TOKEN = Function(
    name="token",
    schema="(Tensor x) -> Tensor",
    shapes=_token_shape,
    flat=split(1),
    nested=join,
    sends=False,
    group_at=None,
)
"""Returns a zero [1] that compilers see as a result of x, so they do not remove the code of x."""
