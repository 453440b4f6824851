"""The operators as custom operators of torch, namespace `ficco`: for compilers, tracers and modes.

Groups are names, schedules are names or JSON text, splits are flat. Records of `ficco.operators`
have schemas, shapes, FLOPs and gradients. Fake results have only shapes; arguments are checked when
the operator runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import register_flop_formula

from ficco.api import groups, operators
from ficco.api.arguments import process_group
from ficco.api.autograd import GRADIENTS, kept_of, refuse_second
from ficco.core.private.torch_core import DisableAutocast, disable_dynamo
from ficco.operators import registry
from ficco.operators.registry import Function

Tensor = torch.Tensor
NAMES: list[str] = []  # of custom operators


def _ranks(group: str) -> tuple[int, int]:
    """Return this rank and the number of ranks of a group."""
    pg = process_group(group)
    return dist.get_rank(pg), dist.get_world_size(pg)


def _define(function: Function) -> None:
    """Define one operator, without `custom_op`, whose checks make every call 50% slower."""
    name, full = function.name, f"ficco::{function.name}"

    # After a graph break, Dynamo would otherwise compile this function.
    @disable_dynamo  # type: ignore[untyped-decorator]
    def impl(*args: Any) -> Any:
        try:
            with DisableAutocast():  # plans choose their dtypes
                return operators.run(name, args)
        except Exception as error:
            if function.sends and function.group_at is not None:
                groups.refuse(args[function.group_at], error)
            raise

    NAMES.append(full)
    torch.library.define(full, function.schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(full, "default", impl)
    torch.library.register_fake(full, lambda *args: function.shapes(_ranks, *args))
    if function.flops is not None:
        register_flop_formula(getattr(torch.ops.ficco, name))(function.flops)
    if function.gradient is not None:
        _register_gradient(full, function)


def _register_gradient(full: str, function: Function) -> None:
    keep_of, gradient = function.keep, function.gradient
    assert keep_of is not None and gradient is not None

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, rest = function.flat(inputs)
        needs = [t is not None and t.requires_grad for t in tensors]
        outputs = [output] if isinstance(output, Tensor) else output
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*keep_of(tensors, rest, needs, outputs))
        ctx.ficco = (rest, needs, [None if t is None else t.shape for t in tensors])

    def backward(ctx: Any, *dys: Any) -> Any:
        refuse_second(function.name)
        rest, needs, shapes = ctx.ficco
        kept = kept_of(ctx, rest, needs, shapes)
        flat = dys[0] if isinstance(dys[0], (list, tuple)) else dys
        with DisableAutocast():  # formulas choose their dtypes
            gradients = function.nested(gradient(GRADIENTS, kept, flat), rest)
        return (*gradients[: -len(rest)], *[None] * len(rest))

    torch.library.register_autograd(full, backward, setup_context=keep)


registry.follow(_define)
