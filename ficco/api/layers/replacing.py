"""Replace the forward of one module, by a subclass of its class with the same name.

A forward in the module's `__dict__` would be bound to that module. What copies a `__dict__`
(`copy.copy`, the replicas of DataParallel) would then compute with the parameters of the original.
A method of the class gets the copy. PyTorch's `fully_shard` and `parametrize` make subclasses, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from ficco.api.layers.layer import ATTRIBUTE, layer_of
from ficco.core.errors import naming

__all__ = ["plain_forward", "replace_forward", "restore_forward"]

Module = torch.nn.Module

_BASES: dict[type, type] = {}  # the classes that were made here, each with its base


def replace_forward(module: Module, forward: Callable[..., Any]) -> None:
    """Replace a module's forward by `forward(module, *arguments)`. The module needs a Layer."""
    base: Any = type(module)
    module.__class__ = _class_with(base, forward)


def restore_forward(module: Module) -> None:
    """Give a module its class back. A class that another library has derived since then stays.

    Shallow copies share the Layer, and the dictionaries of hooks, which are restored, too.
    """
    layer_of(module).restored = True
    module.__class__ = _BASES.get(type(module), type(module))


def plain_forward(module: Module) -> Callable[..., Any]:
    """Return the forward that a module's class had before it was replaced."""
    base: Any = next(_BASES[cls] for cls in type(module).__mro__ if cls in _BASES)
    return base.forward  # type: ignore[no-any-return]


@cache
def _class_with(base: Any, forward: Callable[..., Any]) -> type:
    """Return a subclass with another forward, whose errors, also in backward, name the layer."""

    @wraps(forward)
    def run(module: Module, *args: Any, **options: Any) -> Any:
        if not _is_overlapped(module):  # a copy, or of a class derived from this one
            return base.forward(module, *args, **options)
        if torch.compiler.is_compiling():  # compiled code has no frames of layers
            return forward(module, *args, **options)
        return naming(layer_of(module).name, forward, module, *args, **options)

    def reduce(module: Module, protocol: Any) -> Any:
        made, arguments, *rest = base.__reduce_ex__(module, protocol)
        if not _is_overlapped(module):
            return made, arguments, *rest
        return _new, (layer_of(module).ranks, *arguments), *rest

    members = {
        "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
        "__reduce_ex__": reduce, "forward": run,
    }  # fmt: skip
    made: type = type(base)(base.__name__, (base,), members)
    _BASES[made] = base
    return made


def _is_overlapped(module: Module) -> bool:
    return ATTRIBUTE in module.__dict__ and not layer_of(module).restored


def _new(ranks: Any, cls: Any) -> Any:
    """Make a module without attributes, for copy.copy and copy.deepcopy.

    pickle calls it, too, but cannot pickle `ranks`: its error says what to save instead.
    """
    return cls.__new__(cls)
