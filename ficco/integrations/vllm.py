"""The plugin of vLLM: row-parallel layers overlap the GEMM with the all-reduce.

FICCO_VLLM=1 turns it on. vLLM calls `register` in each of its processes. From then on:

    groups are made       every rank announces its setting, and checks those of the others
    model is built        row layers are of the subclass that `_subclass` makes
    before the profile    windows are opened and sized, and layers are chosen
    a call of a layer     few tokens: vLLM's GEMM and all-reduce; else ficco.matmul_all_reduce

vLLM traces a model once and drops the guards, so a layer cannot branch on the number of tokens.
`ficco::vllm_row` can: compilers decompose it once for each of vLLM's ranges of tokens. So below the
limit vLLM's passes find what they fuse. vLLM is imported by `register` only.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

import ficco
from ficco.api.auto import AUTO
from ficco.api.layers.layer import ATTRIBUTE, Layer, Left
from ficco.core.logs import log
from ficco.core.private import frameworks as names
from ficco.core.private.finding import resolve
from ficco.integrations.serving import (
    announce,
    attach_layers,
    check_equal,
    is_wanted,
    log_layers,
    row_layer,
)

FLAG = "FICCO_VLLM"
_CALL = "ficco_call"  # attribute of an overlapped layer: group, first and least of `_row`
Module = torch.nn.Module
Tensor = torch.Tensor


def register() -> None:
    """Let vLLM build its row layers as a subclass that can overlap, if FICCO_VLLM is 1.

    If vLLM is too old, or lacks a name that is needed, the log says so and vLLM is not changed.

    Raises:
        InputError: FICCO_VLLM is neither 0 nor 1.
    """
    if not is_wanted(FLAG, names.VLLM):
        return
    base: Any = resolve(names.VLLM_LAYER)
    other: Any = resolve(names.VLLM_REPLACEMENTS).get(base.__name__)
    if other is None:
        base.register_oot(_subclass(base))
        _wrap(names.VLLM_GROUPS, _with_equal_ranks)
        _wrap(names.VLLM_WORKER, _with_windows)
    elif not hasattr(other, _CALL):  # else an earlier call has registered it
        log.warning("%s=1 has no effect, vLLM is unchanged: another plugin replaces %s by %s",
                    FLAG, base.__name__, other.__qualname__)  # fmt: skip


def _subclass(base: Any) -> type:
    """Return a subclass of vLLM's RowParallelLinear that runs overlapped layers."""

    class FiccoRowParallelLinear(base):  # type: ignore[misc]
        """A row-parallel layer, overlapped if it has the attribute of `_CALL`."""

        ficco_call: tuple[str, bool, int] | None = None

        def forward(self, input_: Tensor) -> Any:
            """Return what vLLM's layer returns."""
            if self.ficco_call is None:
                return super().forward(input_)
            *_, least = self.ficco_call
            traced = torch.compiler.is_compiling()
            if not traced and _are_few(math.prod(input_.shape[:-1]), least):
                return super().forward(input_)
            bias = None if self.skip_bias_add else self.bias
            y = torch.ops.ficco.vllm_row(input_, self.weight, bias, *self.ficco_call)
            if not self.return_bias:
                return y
            return y, self.bias if self.skip_bias_add else None

    return FiccoRowParallelLinear


def _row(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, first: bool, least: int
) -> Tensor:
    """Sum all ranks' products of x [..., k_r] and weight [n, k_r]; return [..., n].

    Ranks share compiled code of equal calls, so nothing but the arguments may differ between them.

    Args:
        x: this rank's input.
        weight: this rank's weight.
        bias: [n] or None, added once.
        group: the name of the group.
        first: whether this is rank 0, which adds the bias in vLLM's way.
        least: the least number of tokens of an overlapped call.
    """
    if _are_few(math.prod(x.shape[:-1]), least):
        y: Tensor = torch.nn.functional.linear(x, weight, bias if first else None)
        y = resolve(names.VLLM_ALL_REDUCE)(y)
        return y
    flat = x.reshape(-1, x.shape[-1])
    y = torch.ops.ficco.matmul_all_reduce([flat], [weight.t()], bias, group, AUTO, None)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _are_few(rows: int | torch.SymInt, least: int) -> bool:
    """Return whether a call keeps vLLM's way, without a guard on a symbolic number of rows.

    Such a call is traced: for one of vLLM's ranges of tokens, or (outside any) for its shapes.
    """
    if isinstance(rows, int):
        return rows < least
    try:
        context = resolve(names.VLLM_PASS)()
    except AssertionError:
        context = None
    return context is None or bool(context.compile_range.start < least)


torch.library.define(
    "ficco::vllm_row",
    "(Tensor x, Tensor weight, Tensor? bias, str group, bool first, int least) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.impl("ficco::vllm_row", "CompositeImplicitAutograd", _row)


def _wrap(name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function or method of vLLM by `wrapper`, which gets it as its first argument."""
    owner, _, attribute = name.replace(":", ".").rpartition(".")
    function = resolve(name)

    @wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        return wrapper(function, *args, **options)

    setattr(resolve(owner), attribute, wrapped)


def _with_equal_ranks(initialize: Any, *args: Any, **options: Any) -> None:
    """Make vLLM's groups, and check that all ranks of tensor parallelism have the plugin."""
    announce(FLAG, names.VLLM.package)
    initialize(*args, **options)
    check_equal(FLAG, resolve(names.VLLM_GROUP)().ranks)


def _with_windows(init_device: Any, wrapper: Any) -> None:
    """Initialize a worker's device, and let it size windows before it measures memory.

    A worker measures memory from the end of `init_device` to the end of the profile, after it has
    loaded the model, and captures graphs later.
    """
    init_device(wrapper)
    worker = wrapper.worker
    measure: Callable[[], int] = worker.determine_available_memory

    def determine_available_memory() -> int:
        _overlap(worker)
        return measure()

    worker.determine_available_memory = determine_available_memory


def _overlap(worker: Any) -> None:
    """Overlap the layers of a worker's model that can be and that gain, and log them once."""
    try:
        config, model = worker.vllm_config, worker.model_runner.get_model()
        tokens: int = config.scheduler_config.max_num_batched_tokens
        tp = resolve(names.VLLM_GROUP)()
        kept, group, why = _fused_tokens(config, tp.world_size), tp.device_group, _why_unfit(config)
        hashed, compilation = config.additional_config, config.compilation_config
        endpoints = compilation.compile_ranges_endpoints
        layers = [m for m in model.modules() if hasattr(m, _CALL)]
        reasons = [why or _why_left(layer) for layer in layers]
    except AttributeError as error:
        log.warning("%s=1 has no effect, vLLM is unchanged: %s", FLAG, error)
        return
    judged = dict(zip(layers, reasons, strict=True))

    def look(name: str, module: Module) -> Layer | Left | None:
        if (why := judged.get(module)) is None:
            return None
        return Left(name, type(module).__name__, why) if why else row_layer(name, module, group)

    least, left = attach_layers(model, look, tokens, kept)
    if least:
        if endpoints is not None and least > 1:  # ranges of tokens with one choice each
            compilation.compile_ranges_endpoints = sorted({*endpoints, least - 1})
        # vLLM keeps compiled models by a hash of its configuration.
        taken = [name for name, m in model.named_modules() if ATTRIBUTE in m.__dict__]
        digest = hashlib.sha256("\n".join([ficco.__version__, *taken]).encode()).hexdigest()
        hashed["ficco"] = f"{FLAG}, group {group.group_name}, {least} tokens, {digest}"
        for layer in layers:
            if ATTRIBUTE in layer.__dict__:
                setattr(layer, _CALL, (group.group_name, tp.rank_in_group == 0, least))
    if tp.rank_in_group == 0:
        log_layers("vLLM", len(layers), least, tokens, left)


def _fused_tokens(config: Any, world: int) -> int:
    """Return up to how many tokens vLLM fuses the all-reduce with the norm behind it."""
    passes, model = config.compilation_config.pass_config, config.model_config
    most: int = config.scheduler_config.max_num_batched_tokens
    if not passes.fuse_allreduce_rms:
        return 0
    if torch.version.hip is not None:
        return most  # by AITER, whose limit is elsewhere
    fused_bytes: int = passes.flashinfer_max_size(world) or 0
    token_bytes: int = model.get_hidden_size() * model.dtype.itemsize
    return min(most, fused_bytes // token_bytes)


def _why_unfit(config: Any) -> str:
    """Return why no layer of a server is overlapped, or an empty string."""
    if config.lora_config is not None:
        return "LoRA adds to the product before the sum"
    if config.parallel_config.use_ubatching:
        return "two halves of a batch call the group at once"
    if resolve(names.VLLM_INVARIANT):
        return "VLLM_BATCH_INVARIANT=1 wants the same sums for any batch"
    if not isinstance(config.additional_config, dict):
        return "additional_config is not a dict, so compiled models could be mistaken"
    return ""


def _why_left(layer: Any) -> str:
    """Return why a layer keeps vLLM's way, or an empty string."""
    method = layer.quant_method
    if layer.tp_size == 1:
        return "it is not split"
    if not layer.reduce_results:
        return "reduce_results=False: its sum is elsewhere"
    if not layer.input_is_parallel:
        return "it splits its input itself"
    if type(method) is not resolve(names.VLLM_UNQUANTIZED):
        return f"its weight is quantized by {type(method).__name__}"
    if getattr(method, names.VLLM_GEMM_OF, None) is not resolve(names.VLLM_GEMM):
        return "its GEMM is not torch.nn.functional.linear"
    if layer.weight.shape != (layer.output_size, layer.input_size_per_partition):
        return f"its weight is stored as {list(layer.weight.shape)}"
    return ""
