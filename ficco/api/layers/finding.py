"""The result of searching a model for tensor-parallel layers, and checks for all styles.

A style's `look` returns, for one module, a Found (it can overlap), a Left (it is tensor-parallel
but cannot overlap), or None (the style does not apply). `look` changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ficco.api.layers.layer import Left, Split
from ficco.core.errors import InputError
from ficco.core.private.torch_core import transform
from ficco.core.private.torch_layers import local_part
from ficco.engine.compute.torch_dtypes import PROBLEM_NAME_OF

Tensor = torch.Tensor
Module = torch.nn.Module


@dataclass(slots=True, eq=False)
class Found(Split):
    """A layer that can overlap, and the changes that wrap it.

    Attributes:
        module: the layer.
        group: its ProcessGroup.
        forward: function(module, *arguments) that replaces the module's forward.
        reads: facts about its input; column layers of one parent share if these are equal.
        passed, passed_after: keys of forward pre-hooks and forward hooks that the new forward
            replaces.
    """

    module: Module
    group: Any
    forward: Callable[..., Any]
    reads: tuple[Any, ...] | None = None
    passed: tuple[int, ...] = ()
    passed_after: tuple[int, ...] = ()


def class_name(value: Any) -> str:
    """Return the name of a value's class with its module: several libraries have a Linear."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def local_of(parameter: Any) -> Any:
    """Return a parameter's shard on this rank; gradients flow back to the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def closure_of(function: Any) -> dict[str, Any]:
    """Return the values in a function's closure, by name."""
    cells = getattr(function, "__closure__", None)
    if not cells:
        return {}
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def refuse_transforms() -> None:
    """Refuse transforms of torch.func, for which DTensors raise less helpful errors.

    Raises:
        InputError: a transform is active.
    """
    if not torch.compiler.is_compiling() and transform() is not None:
        raise InputError(
            "a transform of torch.func (vmap, grad, jvp, ...) is active, which overlapped layers "
            "do not support; call ficco.restore(model) first"
        )


def unfit(name: str, module: Module, style: str, forward: Any) -> Left | None:
    """Return why a linear layer of any style cannot be overlapped; None: it can.

    Args:
        name: of the layer.
        module: the layer.
        style: its parallel style, for messages.
        forward: the forward that its class must have, because it is replaced.
    """
    weight = getattr(module, "weight", None)
    why = ""
    if type(module).forward is not forward:
        why = f"{class_name(module)} has its own forward"
    elif not isinstance(weight, Tensor) or is_lazy(weight):
        why = "its weight has no values yet; run it once before overlap()"
    elif type(_values(weight)) not in (Tensor, torch.nn.Parameter):
        why = f"its weight is a {class_name(_values(weight))}, which ficco does not support"
    elif weight.dtype not in PROBLEM_NAME_OF:
        why = f"its weight is {weight.dtype}; ficco supports {', '.join(PROBLEM_NAME_OF.values())}"
    return Left(name, style, why) if why else None


def _values(weight: Tensor) -> Tensor:
    local: Tensor = local_part(weight)
    return local
