"""Make a call of an operator: repeat a cached one, or take the route that its tensors need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ficco import registry
from ficco.engines.environment import is_set
from ficco.engines.tensor_facts import CallFinder
from ficco.modules import autograd, call_cache, groups, operators
from ficco.modules.auto import AUTO
from ficco.modules.call_cache import CachedCall, find, key_of
from ficco.modules.routes import (
    DIRECT,
    FORWARD_LEVEL,
    OBSERVERS,
    RECORDED,
    autocast,
    custom,
    is_custom,
    perform,
    survey,
)
from ficco.private.torch_core import DisableAutocast
from ficco.schedule import Schedule

__all__ = ["dispatch", "repeated", "requires_grad"]

Tensor = torch.Tensor
_compiling = torch.compiler.is_dynamo_compiling


def repeated(
    name: str,
    x: Any,
    w: Any,
    absent: tuple[None, ...],
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
        absent: the optional tensors of the operator, all absent.
        group: as the user gave it.
        schedule: as the user gave it.
        facts: the operator's further arguments, as `operators.run` orders them.
        grain: as the user gave it.
    """
    if _compiling():
        return None
    call = _find(name, x, w, absent, group, schedule, facts, grain)
    return None if call is None else call.repeat((x, w))


def _find_in_python(name: str, x: Any, w: Any, *more: Any) -> CachedCall | None:
    """Return the cached call of the arguments of `repeated`, as `_native.CallFinder.find` does."""
    absent, group, schedule, facts, grain = more
    if not isinstance(x, Tensor) or not x.is_cuda or not isinstance(w, Tensor):
        return None  # only calls on GPUs are cached
    if type(grain) not in (int, type(None)) or survey((x, w)) != DIRECT:
        return None
    return find(key_of(name, group, x, (w, *absent), schedule, *facts, grain))


def _finder() -> Callable[..., CachedCall | None]:
    if call_cache.reader is None:
        return _find_in_python
    found: Callable[..., CachedCall | None] = CallFinder(
        call_cache.reader,
        calls=call_cache.calls,
        unordered=call_cache.UNORDERED_CALLS,
        observers=(partial(is_set, "FICCO_DISABLE"), *OBSERVERS),
        forward=FORWARD_LEVEL,
        recording=torch.is_grad_enabled,
        group_of=groups.process_group,
        automatic=(AUTO, torch.cuda.is_current_stream_capturing),
    ).find
    return found


_find = _finder()


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
