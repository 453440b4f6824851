"""What looking through a model gives, whatever made it tensor-parallel, and checks for all styles.

A style's `look` returns, for one module, a Found (it can overlap), a Left (it is tensor-parallel
and cannot), or None (it is not the style's). Looking changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ficco.errors import InputError
from ficco.modules.layers.layer import Left
from ficco.private.torch_core import transform
from ficco.private.torch_layers import local_part

__all__ = ["DTYPES", "Found", "closure_of", "local_of", "refuse_transforms", "unfit"]

DTYPES = {
    torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16",
}  # fmt: skip

Tensor = torch.Tensor
Module = torch.nn.Module


@dataclass(slots=True, eq=False)
class Found:
    """A layer that can overlap, and what wrapping it changes.

    Attributes:
        name, module: which.
        style: by which it is parallel, in words.
        kind: "column" or "row".
        group: its ProcessGroup.
        forward: function(module, *arguments) that takes the place of the module's forward.
        reads: what its input looks like; column layers of one parent that have it alike share.
        input_dim, gathers, output_dim: as of `Layer`.
        returns_local: as of `Layer`.
        passed, passed_after: keys of forward pre-hooks and forward hooks whose work the new forward
            does.
        notes: what `explain` says beside it.
    """

    name: str
    module: Module
    style: str
    kind: str
    group: Any
    forward: Callable[..., Any]
    reads: tuple[Any, ...] | None = None
    input_dim: int | None = None
    gathers: bool = False
    output_dim: int | None = None
    returns_local: bool = False
    passed: tuple[int, ...] = ()
    passed_after: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def local_of(parameter: Any) -> Any:
    """Return a parameter's part on this rank; gradients go back to the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def closure_of(function: Any) -> dict[str, Any]:
    """Return what a function that is a closure holds, by name."""
    cells = getattr(function, "__closure__", None)
    if not cells:
        return {}
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def refuse_transforms() -> None:
    """Refuse transforms of torch.func, which DTensors would refuse in words of their own.

    Raises:
        InputError: one is active.
    """
    if not torch.compiler.is_compiling() and transform() is not None:
        raise InputError(
            "a transform of torch.func (vmap, grad, jvp, ...) is active, and overlapped layers "
            "have no rule for it; call ficco.restore(model) before it"
        )


def unfit(name: str, module: Module, style: str, forward: Any) -> Left | None:
    """Say why a linear layer cannot be overlapped, whatever its style; None: it can.

    Args:
        name: of the layer.
        module: the layer.
        style: by which it is parallel, in words.
        forward: what its class's forward must be, for it is replaced.
    """
    weight = getattr(module, "weight", None)
    why = ""
    if type(module).forward is not forward:
        why = f"{type(module).__name__} has a forward of its own"
    elif not isinstance(weight, Tensor) or is_lazy(weight):
        why = "its weight has no values yet; run it once before overlap()"
    elif type(_values(weight)) not in (Tensor, torch.nn.Parameter):
        why = f"its weight is a {type(_values(weight)).__name__}, which ficco does not multiply"
    elif weight.dtype not in DTYPES:
        why = f"its weight is {weight.dtype}; ficco multiplies {', '.join(DTYPES.values())}"
    return Left(name, style, why) if why else None


def _values(weight: Tensor) -> Tensor:
    local: Tensor = local_part(weight)
    return local
