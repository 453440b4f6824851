"""Which way a call takes: straight to the operator, recorded for autograd, or as a custom operator.

A custom operator costs the host some 10 us, and 20 us where a gradient is recorded, so that it is
taken only where somebody looks on: a compiler, a tracer, a mode, a tensor subclass.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import torch

from ficco.errors import InputError
from ficco.modules import groups, operators
from ficco.schedule import Schedule

__all__ = ["Route", "autocast", "custom", "perform", "route"]

Tensor = torch.Tensor
_PLAIN = (Tensor, torch.nn.Parameter)
_modes = torch._C._len_torch_dispatch_stack
_functions = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_compiling = torch.compiler.is_dynamo_compiling
_autocast = torch._C._is_any_autocast_enabled


class Route(Enum):
    """The ways of a call."""

    DIRECT = 1
    RECORDED = 2
    CUSTOM = 3


def route(tensors: Iterable[Any]) -> Route:
    """Return the way of a call with these tensors.

    Raises:
        InputError: a DTensor, or a transform of torch.func, which nothing here serves.
    """
    if _compiling():
        _refuse_distributed(tensors)
        return Route.CUSTOM
    if _transforms() is not None:
        raise InputError(
            "a transform of torch.func (vmap, grad, jvp, ...) is active, and ficco's operators "
            "have no rule for it; call them outside of it, and backward() for gradients"
        )
    found = Route.CUSTOM if _modes() or _functions() else Route.DIRECT
    recording = torch.is_grad_enabled()
    for tensor in tensors:
        if type(tensor) in _PLAIN:
            if recording and tensor.requires_grad and found is Route.DIRECT:
                found = Route.RECORDED
        elif isinstance(tensor, Tensor):
            _refuse_distributed((tensor,))
            found = Route.CUSTOM
    return found


def perform(name: str, args: Sequence[Any]) -> Any:
    """Run an operator without recording a gradient, unless somebody looks on who does."""
    if _modes() or _functions():
        return custom(name, args)
    return _operator(name)(*args)


def _operator(name: str) -> Any:
    return getattr(operators, name)


def custom(name: str, args: Sequence[Any]) -> Any:
    """Run an operator as a custom operator of torch: groups go by name, schedules as text."""
    given = list(args)
    at = -1 if name == "exchange_rows" else -3
    given[at] = _name(given[at], name)
    if at == -3:
        given[-2] = _text(given[-2])
    return getattr(torch.ops.ficco, name)(*given)


def _name(group: Any, operator: str) -> str:
    if operator == "column_matmul" and not torch.distributed.is_initialized():
        return ""
    return group if isinstance(group, str) else groups.process_group(group).group_name


def _text(schedule: str | Schedule) -> str:
    return schedule if isinstance(schedule, str) else json.dumps(schedule.to_json())


def autocast(tensors: Sequence[Any]) -> Sequence[Any]:
    """Return tensors in the dtype in which autocast wants products, where it is enabled."""
    if not _autocast():
        return tensors
    first = tensors[0]
    device = first.device.type if isinstance(first, Tensor) else "cpu"
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [
        t.to(dtype)
        if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
        else t
        for t in tensors
    ]


def _refuse_distributed(tensors: Iterable[Any]) -> None:
    from torch.distributed.tensor import DTensor

    for tensor in tensors:
        if isinstance(tensor, DTensor):
            raise InputError(
                "a DTensor was given; these functions take this rank's own tensor: pass "
                "tensor.to_local(), and the mesh as group="
            )
