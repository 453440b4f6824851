"""The route of a call: directly to the operator, recorded for autograd, or as a custom operator.

A custom operator costs the host about 10 us, and 20 us if a gradient is recorded. It is used only
if a compiler, a tracer, a mode or a tensor subclass must observe the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch

from ficco.api.arguments import check_dense, check_sized, process_group
from ficco.core.errors import InputError
from ficco.core.private import torch_core
from ficco.operators import registry
from ficco.plan.schedule import Schedule

DIRECT, RECORDED, WATCHED = range(3)  # routes of a call

Tensor = torch.Tensor
_AXES = tuple(field.name for field in fields(Schedule) if field.name != "name")
_Parameter = torch.nn.Parameter
_compiling = torch.compiler.is_dynamo_compiling
_modes = torch_core.dispatch_modes
_functions = torch_core.function_modes
_transform = torch_core.transform
_forward, _LEVEL = torch_core.forward_ad, torch_core.forward_level
_traced = torch_core.is_tracing
_autocast = torch_core.any_autocast
_recording = torch.is_grad_enabled
# `survey` returns WATCHED if one of these functions returns something true, or if the level of
# forward-mode AD, which a dictionary has under a key, is not negative.
OBSERVERS = (_modes, _functions, _autocast, _transform, _traced)
FORWARD_LEVEL = _forward, _LEVEL
SCRIPTING = "__prepare_scriptable__"  # what torch.jit.script calls first, of functions and modules


def survey(tensors: Iterable[Any]) -> int:
    """Return DIRECT, RECORDED (eager autograd records a gradient), or WATCHED."""
    if _compiling() or _modes() or _functions() or _autocast() or _transform() is not None:
        return WATCHED
    if _forward[_LEVEL] >= 0 or _traced():
        return WATCHED
    recording = _recording()
    route = DIRECT
    for tensor in tensors:
        kind = type(tensor)
        if kind is Tensor or kind is _Parameter:
            if recording and tensor.requires_grad:
                route = RECORDED
        elif isinstance(tensor, Tensor):
            return WATCHED
    return route


def is_custom(tensors: Sequence[Any]) -> bool:
    """Return whether a watched call must use the custom operator.

    Raises:
        InputError: a DTensor, a nested tensor, a transform of torch.func, a tangent or
            torch.jit.trace, which are not supported.
    """
    if _compiling():
        _refuse_subclasses(tensors)
        return True
    if _transform() is not None:
        raise InputError(
            "a transform of torch.func (vmap, grad, jvp, ...) is active, and ficco's operators "
            "have no rule for it; call them outside of it, and backward() for gradients"
        )
    if _forward[_LEVEL] >= 0 and any(map(_has_tangent, tensors)):
        raise InputError(
            "a tensor with a tangent was given (torch.autograd.forward_ad), and ficco's operators "
            "have no rule for it; use backward() for gradients"
        )
    if _traced():
        raise InputError(
            "torch.jit.trace is active, and it cannot record ficco's operators; use torch.compile "
            "or torch.export, or ficco.restore(model) before it"
        )
    plain = all(type(t) in (Tensor, _Parameter) or not isinstance(t, Tensor) for t in tensors)
    if not plain:
        _refuse_subclasses(tensors)
    return not plain or is_observed()


def refuse_script() -> None:
    """Refuse torch.jit.script, which would compile the Python code of ficco."""
    raise InputError(
        "torch.jit.script cannot compile ficco's functions and overlapped layers; use "
        "torch.compile or torch.export, or ficco.restore(model) before it"
    )


def is_observed() -> bool:
    """Return whether a mode is active, such as a tracer's; it must see custom operators."""
    return bool(_modes() or _functions())


def custom(name: str, args: Sequence[Any]) -> Any:
    """Run an operator as a custom operator of torch, with group names and schedule texts."""
    arguments, function = list(args), registry.function(name)
    if function.group_at is not None:
        arguments[function.group_at] = _name(arguments[function.group_at], function)
    if function.group_at == -3:
        arguments[-2] = _text(arguments[-2])
    return getattr(torch.ops.ficco, name)(*arguments)


def _name(group: Any, function: registry.Function) -> str:
    if not function.sends and not torch.distributed.is_initialized():
        return ""
    if isinstance(group, str):
        return group
    pg = process_group(group)
    torch_core.note_group(pg)
    name: str = pg.group_name
    return name


def _text(schedule: str | Schedule) -> str:
    """Return a text for `Schedule.read`, without json, which torch.compile cannot trace."""
    if isinstance(schedule, str):
        return schedule
    if not isinstance(schedule, Schedule):
        Schedule.read(schedule)  # raises
    values = [(axis, getattr(schedule, axis)) for axis in _AXES]
    quoted = [f'"{axis}": {v}' if isinstance(v, int) else f'"{axis}": "{v}"' for axis, v in values]
    return "{" + ", ".join(quoted) + "}"


def autocast(tensors: list[Any]) -> list[Any]:
    """Return tensors in autocast's dtype for products, if autocast is enabled."""
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


def _has_tangent(tensor: Any) -> bool:
    unpack: Any = torch.autograd.forward_ad.unpack_dual
    return isinstance(tensor, Tensor) and unpack(tensor).tangent is not None


def _refuse_subclasses(tensors: Iterable[Any]) -> None:
    from torch.distributed.tensor import DTensor

    for tensor in tensors:
        if isinstance(tensor, DTensor):
            raise InputError(
                "a DTensor was given; these functions take this rank's own tensor: pass "
                "tensor.to_local(), and the mesh as group="
            )
        if isinstance(tensor, Tensor):
            check_sized(tensor, "one of the tensors")
            check_dense(tensor, "one of the tensors")
