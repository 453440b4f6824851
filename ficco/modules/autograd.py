"""Gradients of operators in eager calls, and what the formulas of all gradients use.

The formula of an operator is in its record. It runs operators itself (`Gradients`), so that these
overlap, too, and can be traced.

What the loss is: the sum over ranks of what each computes from its own outputs. Where outputs are
equal on all ranks (`matmul_all_reduce`), it is what every rank computes, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ficco import registry
from ficco.errors import InputError
from ficco.lowering.cutting import is_edged
from ficco.modules import groups
from ficco.modules.auto import AUTO
from ficco.modules.call_cache import matrix_of
from ficco.modules.error_context import current_layer, naming
from ficco.modules.routes import perform
from ficco.private.torch_core import DisableAutocast, bag_gradient
from ficco.registry import Function, Kept
from ficco.schedule import Schedule

__all__ = ["GRADIENTS", "Gradients", "Recorded", "refuse_second"]

Tensor = torch.Tensor
Maybe = Tensor | None
_GROUP = -3  # its place among the arguments that are no tensors: before schedule and grain


class Recorded(torch.autograd.Function):
    """An operator whose gradient is recorded, without the dispatcher's cost."""

    @staticmethod
    def forward(ctx: Any, function: Function, rest: tuple[Any, ...], *tensors: Any) -> Any:
        """Run the operator. Arguments: its record, what is no tensor, its tensors."""
        with DisableAutocast():
            result = perform(function.name, function.nested(tensors, rest))
        outputs = [result] if isinstance(result, Tensor) else result
        needs = ctx.needs_input_grad[2:]
        ctx.set_materialize_grads(False)
        assert function.keep is not None
        ctx.save_for_backward(*function.keep(tensors, rest, needs, outputs))
        shapes = [None if t is None else t.shape for t in tensors]
        ctx.ficco = (function, rest, shapes, current_layer())
        return tuple(outputs if function.visible is None else outputs[: function.visible(rest)])

    @staticmethod
    def backward(ctx: Any, *dys: Maybe) -> Any:
        """Return gradients of the tensors."""
        function, rest, shapes, layer = ctx.ficco
        try:
            refuse_second(function.name)
            kept = Kept(ctx.saved_tensors, rest, ctx.needs_input_grad[2:], shapes)
            with DisableAutocast():  # formulas mean their own dtypes
                return (None, None, *naming(layer, function.gradient, GRADIENTS, kept, dys))
        except Exception as error:
            groups.refuse(rest[_GROUP], error)
            raise


def refuse_second(name: str) -> None:
    """Refuse a gradient of a gradient: nothing here would record it."""
    if torch.is_grad_enabled():
        raise InputError(
            f"{name}: a gradient of its gradient was asked for (create_graph=True); ficco has "
            "first gradients only; leave create_graph out"
        )


class Gradients:
    """What gradients of operators use: operators themselves, so that they overlap, too."""

    @staticmethod
    def matrix(dy: Maybe) -> Any:
        """Return a gradient as a matrix with memory of its own; sum()'s is one number, expanded."""
        return None if dy is None else matrix_of(dy).contiguous()

    @staticmethod
    def has_ranks(group: Any) -> bool:
        """Whether there are other ranks, or may be."""
        return bool(group) or torch.distributed.is_initialized()

    @staticmethod
    def run(name: str, args: Sequence[Any]) -> Any:
        """Run a function."""
        return perform(name, args)

    @staticmethod
    def mirror(name: str, args: Sequence[Any]) -> Any:
        """Run the operator that mirrors forward's, by its schedule as far as it has that."""
        *given, asked, grain = args
        schedule = _schedule_of(name, asked)
        return perform(name, (*given, schedule, None if schedule == AUTO else grain))

    @classmethod
    def gather(
        cls, x: Tensor, operands: Sequence[Tensor], axes: Sequence[str], rest: Sequence[Any]
    ) -> list[Tensor]:
        """Gather x once, and multiply it with every operand along its axis."""
        rows, group, schedule, grain = rest
        if "rows" not in axes and schedule != AUTO:
            schedule = _accumulating(schedule)
        unbiased = [False] * len(operands)
        args: tuple[Any, ...] = (
            x,
            operands,
            [],
            unbiased,
            axes,
            rows,
            False,
            group,
            schedule,
            grain,
        )
        products: list[Tensor] = cls.mirror("all_gather_matmul", args)
        return products

    @staticmethod
    def concatenate(tensors: Sequence[Tensor]) -> Tensor:
        """Return tensors below one another."""
        return torch.cat(list(tensors))

    @staticmethod
    def table_gradient(pooled: Tensor, index: Tensor, start: Tensor, height: int) -> Tensor:
        """Return the sum of the gradients of the bags that looked up a row, per row of a table."""
        places = torch.arange(index.shape[0], device=index.device)
        bags = torch.searchsorted(start, places, right=True) - 1  # which bag a place is in
        unused = index.new_empty(0)  # what means and maxima would need
        return bag_gradient(pooled, index, bags, unused, unused, height, False, 0, None, -1)  # type: ignore[no-any-return]


GRADIENTS = Gradients()


@lru_cache(maxsize=64)
def _schedule_of(name: str, schedule: str | Schedule) -> str | Schedule:
    """Return the schedule of forward, without the axes that this operator does not have.

    One launch that stores at peers is a schedule of few operators, and the nearest of others is
    none for few rows: there `auto` chooses.
    """
    if schedule == AUTO:
        return schedule
    asked, flow = Schedule.read(schedule), registry.get(name).flow
    if asked.transport == "sm" and not flow.shares:
        return AUTO
    known = asked
    if asked.sums != "apart" and not flow.sums:
        known = replace(known, sums="apart", name="custom")
    if not (flow.gathers or flow.shares) and asked.pace != "free":
        known = replace(known, pace="free", name="custom")
    if asked.taper == "edge" and not is_edged(flow):
        known = replace(known, taper="none", name="custom")
    return schedule if known is asked else known


@lru_cache(maxsize=64)
def _accumulating(schedule: str | Schedule) -> Schedule:
    """Return the schedule, or the nearest that can add up what arrives: tiles of one launch cannot.

    A user who names a schedule for forward has not asked for it here.
    """
    asked = Schedule.read(schedule)
    if asked.compute != "gated" or asked.transport == "sm":
        return asked
    groups.log.info("%s adds up no weight gradient: compute='per_chunk' there", asked.name)
    return replace(asked, compute="per_chunk", name="custom")
