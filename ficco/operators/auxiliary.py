"""Functions of PyTorch without a plan, which gradients and mixtures of experts call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ficco.operators.functions import join, split
from ficco.operators.registry import Array, Function, Kept
from ficco.operators.routing import HEADER


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


def _routed_shapes(
    ranks: Callable[[str], tuple[int, int]],
    ids: Array,
    gates: Array | None,
    experts: int,
    group: str,
    rows: Sequence[int],
    capacity: int | None,
) -> list[Array]:
    rank, world = ranks(group)
    slots = sum(rows) * ids.shape[1]
    table = HEADER + 2 * (experts // world) + rows[rank] * ids.shape[1] + slots
    tables = [ids.new_empty((table,)).int()]
    return tables if gates is None else [*tables, gates.new_empty((slots,))]


def _keep_shape(tensors: Any, rest: Any, needs: Any, ys: Any) -> list[Any]:
    return []


def _route_gradient(gradients: Any, kept: Kept, dys: Sequence[Any]) -> list[Any]:
    """Return the gates' gradient: the sum over ranks, of which one has each slot."""
    if len(dys) < 2 or dys[1] is None or not kept.needs[1]:
        return [None, None]
    _, group, rows, _ = kept.rest
    topk = kept.shapes[1][1]
    return [None, gradients.run("return_gates", (dys[1], topk, group, rows))]


ROUTE_EXPERTS = Function(
    name="route_experts",
    schema="(Tensor ids, Tensor? gates, int experts, str group, SymInt[] rows, SymInt? capacity)"
    " -> Tensor[]",
    shapes=_routed_shapes,
    flat=split(2),
    nested=join,
    keep=_keep_shape,
    gradient=_route_gradient,
    several=True,
    casts=False,
    group_at=3,
    leading=(0, "ids"),
)
"""Sends ids and gates of experts to all ranks, and makes a table of this rank's rows."""


def _returned_shape(
    ranks: Callable[[str], tuple[int, int]], dgates: Array, topk: int, group: str,
    rows: Sequence[int],
) -> Array:  # fmt: skip
    return dgates.new_empty((rows[ranks(group)[0]], topk))


RETURN_GATES = Function(
    name="return_gates",
    schema="(Tensor dgates, SymInt topk, str group, SymInt[] rows) -> Tensor",
    shapes=_returned_shape,
    flat=split(1),
    nested=join,
    casts=False,
    group_at=2,
)
"""Returns the gradients of gates to the owners of their tokens, by one collective."""
