"""The plugin of SGLang: parallel layers overlap their GEMM with their communication.

FICCO_SGLANG=1 turns it on. SGLang calls `register` in each of its processes, and then places the
hooks that it has registered:

    groups are made           every rank announces its setting, and checks those of the others
    before the KV cache       windows are opened and sized, and layers are chosen
    RowParallelLinear         few tokens: SGLang's way; else matmul_all_reduce
    with sequence parallelism     all_gather_matmul, matmul_reduce_scatter

Traced calls keep SGLang's way, because a compiler sees no number of tokens. SGLang is imported by
`register` only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ficco.api.layers.layer import ATTRIBUTE, Layer, Left
from ficco.core.logs import log
from ficco.core.private import frameworks as names
from ficco.core.private.finding import resolve
from ficco.integrations.serving import (
    announce,
    attach_layers,
    check_equal,
    column_layer,
    is_wanted,
    log_layers,
    row_layer,
)

FLAG = "FICCO_SGLANG"
_LEAST = "ficco_least"  # attribute of an overlapped layer: the least tokens of its calls
_registered: list[Any] = []  # the registry of hooks that has this plugin's
Module = torch.nn.Module
Tensor = torch.Tensor


def register() -> None:
    """Register hooks of SGLang that overlap its layers, if FICCO_SGLANG is 1.

    If SGLang is too old, or lacks a name that is needed, the log says so and SGLang is not changed.

    Raises:
        InputError: FICCO_SGLANG is neither 0 nor 1.
    """
    if not is_wanted(FLAG, names.SGLANG):
        return
    hooks: Any = resolve(names.SGLANG_HOOKS)
    if hooks in _registered:
        return
    _registered.append(hooks)
    around = resolve(names.SGLANG_HOOK_TYPES).AROUND
    for name, hook in (
        (names.SGLANG_GROUPS, _with_equal_ranks),
        (names.SGLANG_MEMORY, _with_windows),
        (names.SGLANG_FORWARD, _reduce),
        (names.SGLANG_SP_GATHER, _gather),
        (names.SGLANG_SP_SCATTER, _scatter),
    ):
        hooks.register(name.replace(":", "."), hook, around)


def _with_equal_ranks(initialize: Any, *args: Any, **options: Any) -> None:
    """Make SGLang's groups, and check that all ranks of tensor parallelism have the plugin."""
    announce(FLAG, names.SGLANG.package)
    initialize(*args, **options)
    check_equal(FLAG, resolve(names.SGLANG_PARALLEL)().tp_group.ranks)


def _with_windows(allocate: Any, runner: Any, *args: Any, **options: Any) -> Any:
    """Size windows before SGLang divides the free memory, which is before it captures graphs."""
    if not runner.is_draft_worker:
        _overlap(runner.model)
    return allocate(runner, *args, **options)


def _overlap(model: Module) -> None:
    """Overlap the layers of a model that can be and that gain, and log them once."""
    try:
        group, sp = resolve(names.SGLANG_PARALLEL)().tp_group, resolve(names.SGLANG_SP)()
        schedule, why = resolve(names.SGLANG_SCHEDULE)(), _why_unfit()
        chunk: int = schedule.chunked_prefill_size or 0
        tokens: int = chunk if chunk > 0 else schedule.max_prefill_tokens
    except AttributeError as error:
        log.warning("%s=1 has no effect, SGLang is unchanged: %s", FLAG, error)
        return
    row, column = resolve(names.SGLANG_ROW), resolve(names.SGLANG_COLUMN)
    kinds = (row, column) if sp else (row,)

    def look(name: str, module: Module) -> Layer | Left | None:
        if not isinstance(module, kinds):
            return None
        if reason := why or _why_left(module, group, sp):
            return Left(name, type(module).__name__, reason)
        if not isinstance(module, row):
            return column_layer(name, module, group.device_group)
        dim = 0 if sp else None
        return row_layer(name, module, group.device_group, output_dim=dim)

    least, left = attach_layers(model, look, tokens, kept=0)
    layers = [module for module in model.modules() if isinstance(module, kinds)]
    for layer in layers if least else []:
        if ATTRIBUTE in layer.__dict__:
            setattr(layer, _LEAST, least)
    if group.rank_in_group == 0:
        log_layers("SGLang", len(layers), least, tokens, left)


def _why_unfit() -> str:
    """Return why no layer of a server is overlapped, or an empty string."""
    execution = resolve(names.SGLANG_EXECUTION)()
    if resolve(names.SGLANG_LORA)().enable_lora:
        return "LoRA adds to the product before the sum"
    if execution.overlap.enable_two_batch_overlap:
        return "two halves of a batch call the group at once"
    if execution.deterministic.enable_deterministic_inference:
        return "deterministic inference wants the same sums for any batch"
    if execution.comm.enable_quant_communications:
        return "its sums are quantized"
    return ""


def _why_left(layer: Any, group: Any, sp: bool) -> str:
    """Return why a layer keeps SGLang's way, or an empty string."""
    row = isinstance(layer, resolve(names.SGLANG_ROW))
    if layer.tp_group is None or group.world_size == 1:
        return "it is not split"
    if layer.tp_group is not group:
        return "its group is not that of tensor parallelism"
    if row and (why := _why_left_row(layer, sp)):
        return why
    if type(layer.quant_method) is not resolve(names.SGLANG_UNQUANTIZED):
        return f"its weight is quantized by {type(layer.quant_method).__name__}"
    if getattr(layer, names.SGLANG_CUTLASS, False):
        return "a kernel of SGLang multiplies and sends"
    if layer.weight.dim() != 2 or layer.weight.shape[1] != _width(layer, row):
        return f"its weight is stored as {list(layer.weight.shape)}"
    return ""


def _why_left_row(layer: Any, sp: bool) -> str:
    """Return why the sum of a row layer is not ficco's, or an empty string."""
    if not (sp or layer.reduce_results):
        return "reduce_results=False: its sum is elsewhere"
    if layer.use_dp_attention_reduce or layer.use_decode_attn_tp:
        return "its sum is that of attention's data parallelism"
    return "" if layer.input_is_parallel else "it splits its input itself"


def _width(layer: Any, row: bool) -> int:
    """Return the number of columns of a layer's input on this rank."""
    return layer.input_size_per_partition if row else layer.input_size  # type: ignore[no-any-return]


def _is_overlapped(layer: Any, rows: Callable[[], int]) -> bool:
    """Return whether a call runs ficco's function; rows: of the call over all ranks."""
    least = getattr(layer, _LEAST, 0)
    return bool(least) and not torch.compiler.is_compiling() and rows() >= least


def _reduce(
    forward: Any, layer: Any, input_: Tensor, skip_all_reduce: bool = False,
    forward_batch: Any = None, output_tensor: Tensor | None = None,
) -> Any:  # fmt: skip
    """Run a row layer; with sequence parallelism its forward calls what `_scatter` replaces."""
    if (
        not _is_overlapped(layer, lambda: math.prod(input_.shape[:-1]))
        or skip_all_reduce
        or output_tensor is not None
        or not layer.reduce_results
        or layer.use_decode_attn_tp
        or layer.__dict__[ATTRIBUTE].output_dim is not None
        or resolve(names.SGLANG_SKIPPED)()
    ):
        return forward(layer, input_, skip_all_reduce, forward_batch, output_tensor)
    bias = None if layer.skip_bias_add else layer.bias
    y = layer.__dict__[ATTRIBUTE].reduce(input_, layer.weight, bias)
    return y, layer.bias if layer.skip_bias_add else None


def _gather(multiply: Any, layer: Any, input_parallel: Tensor, bias: Tensor | None) -> Tensor:
    """Gather the shards of all ranks' tokens, and multiply; drop the rows that pad them."""
    tokens: int = resolve(names.SGLANG_SP_TOKENS)()
    if not _is_overlapped(layer, lambda: tokens):
        return multiply(layer, input_parallel, bias)  # type: ignore[no-any-return]
    ys: list[Tensor] = layer.__dict__[ATTRIBUTE].gather(input_parallel, 0, [layer.weight], [bias])
    return ys[0][:tokens]


def _scatter(multiply: Any, layer: Any, input_: Tensor, bias: Tensor | None) -> Tensor:
    """Sum all ranks' products, and return this rank's shard of the tokens, padded with zeros."""
    if not _is_overlapped(layer, lambda: len(input_)):
        return multiply(layer, input_, bias)  # type: ignore[no-any-return]
    padded = torch.nn.functional.pad(input_, (0, 0, 0, -len(input_) % layer.tp_group.world_size))
    bias = None if layer.skip_bias_add else layer.bias  # SGLang passes it on rank 0 only
    return layer.__dict__[ATTRIBUTE].scatter(padded, 0, layer.weight, bias)  # type: ignore[no-any-return]
