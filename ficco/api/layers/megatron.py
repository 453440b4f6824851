"""Layers of Megatron-Core: ColumnParallelLinear, RowParallelLinear, found by class and attributes.

Inputs are [sequence, batch, hidden]; sequence parallelism splits the first dimension. Both layers
return (output, bias), with the bias if the caller must add it. Megatron is not imported.
"""

from __future__ import annotations

from typing import Any

import torch

from ficco.api.layers import main_grad
from ficco.api.layers.finding import Found, unfit
from ficco.api.layers.layer import Left, layer_of
from ficco.api.layers.replacing import plain_forward
from ficco.core.private.frameworks import OFFLOADING, TRANSFORMER_ENGINE
from ficco.core.private.torch_layers import parameters_of

Module = torch.nn.Module
Tensor = torch.Tensor

_KINDS = {"ColumnParallelLinear": "column", "RowParallelLinear": "row"}
_EMBEDDING = "VocabParallelEmbedding"
_OF_TRANSFORMER_ENGINE = (
    "it is a layer of Transformer Engine; make the layers with --spec ficco.integrations.megatron "
    "gpt_spec, or with --transformer-impl local"
)
_REQUIRED_ATTRIBUTES = ("config", "skip_bias_add", "sequence_parallel")


def look(name: str, module: Module, group: Any) -> Found | Left | None:
    """Return how Megatron has made a module parallel, or None; `group` if the module has none."""
    names = [c.__name__ for c in type(module).__mro__]
    if _EMBEDDING in names and hasattr(module, "tp_group"):
        return Left(name, _EMBEDDING, "an embedding has no GEMM to hide behind", False)
    engine = next((each for each in names if each in TRANSFORMER_ENGINE), None)
    if engine is not None and getattr(module, "tp_size", 1) > 1:
        return Left(name, engine, _OF_TRANSFORMER_ENGINE)
    cls = next((c for c in type(module).__mro__ if c.__name__ in _KINDS), None)
    if cls is None or not all(hasattr(module, attribute) for attribute in _REQUIRED_ATTRIBUTES):
        return None
    kind, facts = _KINDS[cls.__name__], module.__dict__
    why = _why_unfit(kind, module)
    if not why and "forward" in facts:
        why = "its forward was already replaced"
    if why:
        return Left(name, cls.__name__, why)
    given = parameters_of(module).get("weight")
    if given is not None and (left := unfit(name, module, cls.__name__, cls.forward)):  # type: ignore[attr-defined]
        return left
    group = facts.get("tp_group", group)
    split = bool(module.sequence_parallel)
    dim = 0 if split else None
    if kind == "row":
        return Found(name, cls.__name__, kind, module, group, _row, output_dim=dim)
    return Found(name, cls.__name__, kind, module, group, _column, input_dim=dim, gathers=split)


def _why_unfit(kind: str, module: Any) -> str:
    """Return why a layer cannot be overlapped, or an empty string."""
    config = module.config
    if getattr(module, "explicit_expert_comm", False) or getattr(module, "is_expert", False):
        return "experts have their own communication"
    if getattr(config, OFFLOADING, None) is not None:
        return "it offloads its activations"
    if kind == "row":
        return "" if module.input_is_parallel else "it splits its input itself"
    if module.gather_output:
        return "it gathers its output"
    if getattr(module, "disable_grad_reduce", False):
        return "disable_grad_reduce leaves the sum of its input's gradient to the caller"
    if getattr(config, "defer_embedding_wgrad_compute", False):
        return "it defers its weight's gradient"
    return ""


def _column(
    module: Any,
    input_: Tensor,
    weight: Tensor | None = None,
    runtime_gather_output: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run a column layer's forward, with Megatron's arguments."""
    layer = layer_of(module)
    if runtime_gather_output:
        layer.notes[:] = ["calls with runtime_gather_output ran without ficco"]
        plain: tuple[Tensor, Tensor | None] = plain_forward(module)(
            module, input_, weight, runtime_gather_output
        )
        return plain
    weight = module.weight if weight is None else weight
    if weight is None or tuple(weight.shape) != (
        module.output_size_per_partition, module.input_size,
    ):  # fmt: skip
        plain_forward(module)(module, input_, weight)  # raises Megatron's own error
    bias = None if module.skip_bias_add else module.bias
    if layer.input_dim is None:
        (y,) = main_grad.call(module, weight, layer.columns, input_, [weight], [bias])
    else:
        dim = layer.input_dim
        (y,) = main_grad.call(module, weight, layer.gather, input_, dim, [weight], [bias])
    return y, module.bias if module.skip_bias_add else None


def _row(module: Any, input_: Tensor) -> tuple[Tensor, Tensor | None]:
    """Run a row layer's forward.

    Under sequence parallelism Megatron itself sums the bias's gradient over ranks after backward.
    The bias is therefore added here, so ficco does not sum its gradient.
    """
    layer, weight = layer_of(module), module.weight
    bias = None if module.skip_bias_add else module.bias
    if layer.output_dim is None:
        y = main_grad.call(module, weight, layer.reduce, input_, weight, None)
    else:
        dim = layer.output_dim
        y = main_grad.call(module, weight, layer.scatter, input_, dim, weight, None)
    if bias is not None:
        y = y + bias
    return y, module.bias if module.skip_bias_add else None
