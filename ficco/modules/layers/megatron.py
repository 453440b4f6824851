"""Layers of Megatron-Core: ColumnParallelLinear, RowParallelLinear, known by class and attributes.

Inputs are [sequence, batch, hidden], the first dimension split under sequence parallelism; both
return (output, bias), the bias where the caller is to add it. Megatron is not imported.
"""

from __future__ import annotations

from typing import Any

import torch

from ficco.modules.layers.finding import Found, unfit
from ficco.modules.layers.layer import Left, layer_of
from ficco.private.frameworks import OFFLOADING
from ficco.private.torch_layers import parameters_of

__all__ = ["look"]

Module = torch.nn.Module
Tensor = torch.Tensor

_KINDS = {"ColumnParallelLinear": "column", "RowParallelLinear": "row"}
_NEEDED = ("config", "skip_bias_add", "sequence_parallel")


def look(name: str, module: Module, group: Any) -> Found | Left | None:
    """Return what Megatron made of a module, if anything; `group` where it does not say."""
    cls = next((c for c in type(module).__mro__ if c.__name__ in _KINDS), None)
    if cls is None or not all(hasattr(module, attribute) for attribute in _NEEDED):
        return None
    kind, facts = _KINDS[cls.__name__], module.__dict__
    why = _reason(kind, module)
    if not why and "forward" in facts:
        why = "its forward was replaced before"
    if why:
        return Left(name, cls.__name__, why)
    given = parameters_of(module).get("weight")
    if given is not None and (left := unfit(name, module, cls.__name__, cls.forward)):  # type: ignore[attr-defined]
        return left
    group = facts.get("tp_group", group)
    split = bool(module.sequence_parallel)
    dim = 0 if split else None
    if kind == "row":
        return Found(name, module, cls.__name__, kind, group, _row, output_dim=dim)
    return Found(name, module, cls.__name__, kind, group, _column, input_dim=dim, gathers=split)


def _reason(kind: str, module: Any) -> str:
    """Return why a layer must stay as it is, or nothing."""
    config = module.config
    if getattr(module, "explicit_expert_comm", False) or getattr(module, "is_expert", False):
        return "experts communicate in a way of their own"
    if getattr(config, "gradient_accumulation_fusion", False):
        return "gradient_accumulation_fusion adds up weight gradients in a kernel of its own"
    if getattr(config, OFFLOADING, None) is not None:
        return "it offloads its activations"
    if kind == "row":
        return "" if module.input_is_parallel else "its input is not parallel, so it splits it"
    if module.gather_output:
        return "it gathers its output"
    if getattr(module, "disable_grad_reduce", False):
        return "disable_grad_reduce leaves the sum of its input's gradient to others"
    if getattr(config, "defer_embedding_wgrad_compute", False):
        return "it defers its weight's gradient"
    return ""


def _column(
    module: Any,
    input_: Tensor,
    weight: Tensor | None = None,
    runtime_gather_output: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Forward of a column layer; its arguments are those of Megatron's."""
    layer = layer_of(module)
    if runtime_gather_output:
        layer.notes[:] = ["calls with runtime_gather_output ran as without ficco"]
        plain: tuple[Tensor, Tensor | None] = type(module).forward(
            module, input_, weight, runtime_gather_output
        )
        return plain
    weight = module.weight if weight is None else weight
    if weight is None or tuple(weight.shape) != (
        module.output_size_per_partition, module.input_size,
    ):  # fmt: skip
        type(module).forward(module, input_, weight)  # raises, and says it in Megatron's words
    bias = None if module.skip_bias_add else module.bias
    if layer.input_dim is None:
        y = layer.columns(input_, [weight], [bias])[0]
    else:
        y = layer.gather(input_, layer.input_dim, [weight], [bias])[0]
    return y, module.bias if module.skip_bias_add else None


def _row(module: Any, input_: Tensor) -> tuple[Tensor, Tensor | None]:
    """Forward of a row layer.

    Under sequence parallelism Megatron sums the bias's gradient over ranks by itself, after
    backward; so the bias is added here, and ficco's sum of that gradient is not made.
    """
    layer = layer_of(module)
    bias = None if module.skip_bias_add else module.bias
    if layer.output_dim is None:
        y = layer.reduce(input_, module.weight, None)
    else:
        y = layer.scatter(input_, layer.output_dim, module.weight, None)
    if bias is not None:
        y = y + bias
    return y, module.bias if module.skip_bias_add else None
