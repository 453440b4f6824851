"""Make a call of an operator: repeat a cached one, or take the route that its tensors need."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.distributed import GroupMember

from ficco import registry
from ficco.engines.tensor_facts import CallFinder, flat_table
from ficco.modules import autograd, call_cache, operators
from ficco.modules.auto import AUTO
from ficco.modules.call_cache import CachedCall, find, key_of
from ficco.modules.group_argument import process_group
from ficco.modules.groups import refuse
from ficco.modules.operands import weights_of
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

__all__ = ["Form", "dispatch", "repeatable", "requires_grad"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
Tensor = torch.Tensor
_compiling = torch.compiler.is_dynamo_compiling


class Form(NamedTuple):
    """How a function of one input is called, for the cache of calls.

    Attributes:
        op: the operator.
        several: whether the function takes one weight or a list of them, which share the input.
            Which of them have a bias comes before `rest` then.
        bias: whether the function has the argument `bias`: a tensor or None, or with `several` a
            list of these, one per weight.
        rest: its further arguments in cached calls, as `operators.run` orders them.
        unset: names of arguments that are None in these calls.
        flags: names of arguments that are bools, and that do not matter in these calls.
        table: name of the third argument, a square table of ints, which follows `rest`; None:
            there is none.
    """

    op: str
    several: bool = False
    bias: bool = False
    rest: tuple[Any, ...] = ()
    unset: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    table: str | None = None


# A cached call, its tensors, and whether it returns a tuple of results.
Found = tuple[CachedCall, Sequence[Any], bool]


def repeatable(form: Form) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function that all ranks call, as `groups.collective` does; repeat cached calls.

    A repeated call costs the host least if it looks at its arguments once: the cached call is found
    before Python assigns them to parameters.

    Args:
        form: of the calls that may be repeated.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        place = list(inspect.signature(function).parameters).index("group")

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if _compiling():
                return function(*args, **kwargs)
            try:
                found = _find(form, args, kwargs)
                if found is not None:
                    cached, tensors, several = found
                    ys = cached.run(tensors)
                    if ys is not None:
                        return tuple(ys) if several else ys[0]  # type: ignore[return-value]
                return function(*args, **kwargs)
            except Exception as error:
                refuse(args[place] if len(args) > place else kwargs.get("group"), error)
                raise

        return call

    return decorate


def _find_in_python(form: Form, args: tuple[Any, ...], words: Mapping[str, Any]) -> Found | None:
    """Return the cached call of a function's arguments, as `_native.CallFinder.find` does."""
    x, w, *more = args if len(args) > 1 else (None, None)
    if not isinstance(x, Tensor) or not x.is_cuda:
        return None  # only calls on GPUs are cached
    if not isinstance(w, (Tensor, list, tuple) if form.several else Tensor):
        return None  # an iterator is read once, by the call
    given: dict[Any, Any] = {"group": None, "schedule": AUTO, "grain": None, **words}
    rest = form.rest
    if form.table is not None:
        table = flat_table(more.pop() if len(more) == 1 else given.pop(form.table, None))
        if table is None:
            return None
        rest = (*rest, table)
    group, schedule, grain = given.pop("group"), given.pop("schedule"), given.pop("grain")
    bias = given.pop("bias", None) if form.bias else None
    unset = [given.pop(name) for name in form.unset if name in given]
    flags = [given.pop(name) for name in form.flags if name in given]
    if more or given or any(each is not None for each in unset):
        return None
    if any(type(each) is not bool for each in flags) or type(grain) not in (int, type(None)):
        return None
    if form.several:
        weights, biases, biased = weights_of(w, bias)
        if len(biased) != len(weights):
            return None
        others, rest = [*weights, *biases], (tuple(biased), *rest)
    else:
        others = [w, bias] if form.bias else [w]
    tensors = [x, *(other for other in others if other is not None)]
    if not all(isinstance(tensor, Tensor) for tensor in tensors) or survey(tensors) != DIRECT:
        return None
    call = find(key_of(form.op, group, x, others, schedule, *rest, grain))
    return None if call is None else (call, tensors, form.several and not isinstance(w, Tensor))


def _finder() -> Callable[..., Found | None]:
    if call_cache.reader is None:
        return _find_in_python
    found: Callable[..., Found | None] = CallFinder(
        call_cache.reader,
        calls=(call_cache.calls, call_cache.UNORDERED_CALLS),
        off="FICCO_DISABLE",
        observers=OBSERVERS,
        forward=FORWARD_LEVEL,
        recording=torch.is_grad_enabled,
        group_of=(GroupMember, process_group),
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
