"""Layers of DeepSpeed's AutoTP: LinearLayer, LinearAllreduce, found by class and attributes.

A LinearLayer multiplies an input that all ranks hold by its columns of the weight; in backward the
input's gradient is summed over the ranks. A LinearAllreduce sums products over the ranks, and adds
the bias, which is whole on every rank. DeepSpeed is not imported.
"""

from __future__ import annotations

from typing import Any

import torch

from ficco.api.layers.finding import Found, class_name, unfit
from ficco.api.layers.layer import Left, layer_of
from ficco.core.private.frameworks import ZERO_SHARD
from ficco.core.private.torch_layers import parameters_of

Module = torch.nn.Module
Tensor = torch.Tensor

_KINDS = {"LinearLayer": "column", "LinearAllreduce": "row"}
_REQUIRED_ATTRIBUTES = ("mp_group", "tp_world_size", "is_tp_parallel")


def look(name: str, module: Module, group: Any) -> Found | Left | None:
    """Return how AutoTP has made a module parallel, or None; `group` if the module has none."""
    cls = next((c for c in type(module).__mro__ if c.__name__ in _KINDS), None)
    if cls is None or not all(hasattr(module, attribute) for attribute in _REQUIRED_ATTRIBUTES):
        return None
    kind, style = _KINDS[cls.__name__], cls.__name__
    if why := _why_unfit(module, cls):
        return Left(name, style, why)
    if left := unfit(name, module, style, cls.forward):  # type: ignore[attr-defined]
        return left
    given: Any = module.mp_group
    group = group if given is None else given
    return Found(name, style, kind, module, group, _row if kind == "row" else _column)


def _why_unfit(module: Any, cls: type) -> str:
    """Return why a layer cannot be overlapped, or an empty string."""
    parameters = parameters_of(module).values()
    if type(module) is not cls:
        return f"{class_name(module)} has a forward of its own"
    if "forward" in module.__dict__:
        return "its forward was already replaced"
    if getattr(module, "defer_collectives_to_compiler", False):
        return "defer_collectives_to_compiler leaves its sums to DeepSpeed's compiler"
    if getattr(module, "gather_output", False):
        return "it gathers its output"
    if any(hasattr(each, ZERO_SHARD) for each in parameters):
        return "ZeRO-3 holds its weight in shards, and gathers it for each call"
    return ""


def _column(module: Any, input: Tensor) -> Tensor:
    """Run a column layer's forward, with DeepSpeed's argument."""
    return layer_of(module).columns(input, [module.weight], [module.bias])[0]


def _row(module: Any, input: Tensor) -> Tensor:
    """Run a row layer's forward; the bias has a gradient on every rank, which is not summed."""
    y = layer_of(module).reduce(input, module.weight, None)
    return y if module.bias is None else y + module.bias
