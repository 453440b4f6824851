"""Make a call of an operator: repeat a cached one, or take the route that its tensors need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ficco import registry
from ficco.modules import autograd, operators
from ficco.modules.call_cache import find, key_of
from ficco.modules.routes import DIRECT, RECORDED, autocast, custom, is_custom, perform, survey
from ficco.private.torch_core import DisableAutocast
from ficco.schedule import Schedule

__all__ = ["dispatch", "repeated", "requires_grad"]

Tensor = torch.Tensor


def repeated(
    name: str,
    x: Any,
    w: Any,
    more: tuple[None, ...],
    group: Any,
    schedule: str | Schedule,
    facts: tuple[Any, ...],
    grain: int | None,
) -> Tensor | None:
    """Repeat a call that `operators.run` has cached, of one input and one weight, or return None.

    Args:
        name: of the operator.
        x: the input.
        w: the weight.
        more: the optional tensors of the operator, all absent.
        group: as the user gave it.
        schedule: as the user gave it.
        facts: the operator's further arguments, as `operators.run` orders them.
        grain: as the user gave it.
    """
    if not isinstance(x, Tensor) or not x.is_cuda or not isinstance(w, Tensor):
        return None  # only calls on GPUs are cached
    if type(grain) not in (int, type(None)) or survey((x, w)) != DIRECT:
        return None
    call = find(key_of(name, group, x, (w, *more), schedule, *facts, grain))
    return None if call is None else call.run((x, w))[0]


def dispatch(name: str, args: tuple[Any, ...], way: int) -> Any:
    """Make a call by the route that its tensors need."""
    if way == DIRECT:
        return operators.run(name, args)
    function = registry.function(name)
    flat, rest = function.flat(args)
    if way == RECORDED:
        return _recorded(function, rest, flat)
    if function.casts:
        flat = autocast(flat)
    nested = function.nested(flat, rest)
    recording = torch.is_grad_enabled() and any(map(requires_grad, flat))
    if is_custom(flat):
        if not (function.sends or recording) and torch.compiler.is_dynamo_compiling():
            return operators.run(name, nested)  # nothing is sent: let the compiler fuse it
        return custom(name, nested)
    if recording:
        return _recorded(function, rest, flat)
    with DisableAutocast():  # plans set their own dtypes
        return perform(name, nested)


def _recorded(function: registry.Function, rest: tuple[Any, ...], flat: Sequence[Any]) -> Any:
    ys = autograd.Recorded.apply(function, rest, *flat)  # type: ignore[no-untyped-call]
    return ys if function.several else ys[0]


def requires_grad(tensor: Any) -> bool:
    """Return whether an argument is a tensor that requires a gradient."""
    return isinstance(tensor, Tensor) and tensor.requires_grad
