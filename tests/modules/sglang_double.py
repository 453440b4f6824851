"""Stand-ins for what the plugin uses of SGLang 0.5.23: its layers, groups, settings and hooks.

`install` makes them importable as SGLang's modules.
"""

from __future__ import annotations

import pkgutil
import sys
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from stubs import make_modules

__version__ = "0.5.23"
Tensor = torch.Tensor
_hooks: dict[str, Any] = {}
state = SimpleNamespace(tp_group=None, sp=False, sp_tokens=0, skips=False)
settings = SimpleNamespace(
    exec=SimpleNamespace(
        overlap=SimpleNamespace(enable_two_batch_overlap=False),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
        comm=SimpleNamespace(enable_quant_communications=False),
    ),
    schedule=SimpleNamespace(chunked_prefill_size=96, max_prefill_tokens=512),
    lora=SimpleNamespace(enable_lora=False),
)


def get_parallel() -> Any:
    return state


def get_exec() -> Any:
    return settings.exec


def get_schedule() -> Any:
    return settings.schedule


def get_lora() -> Any:
    return settings.lora


def should_skip_mlp_all_reduce() -> bool:
    return bool(state.skips)


def layernorm_sp_enabled() -> bool:
    return bool(state.sp)


def sp_num_tokens() -> int:
    return int(state.sp_tokens)


def initialize_model_parallel(backend: str | None = None) -> None:
    group = dist.new_group()
    dist.barrier(group)
    state.tp_group = SimpleNamespace(
        ranks=dist.get_process_group_ranks(group), device_group=group, cpu_group=group,
        rank_in_group=dist.get_rank(group), world_size=dist.get_world_size(group),
    )  # fmt: skip


class UnquantizedLinearMethod:
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)


class ColumnParallelLinear(torch.nn.Module):
    def __init__(self, input_size: int, output_size: int, bias: bool = True) -> None:
        super().__init__()
        self.tp_group, self.input_size = state.tp_group, input_size
        self.quant_method, self.skip_bias_add = UnquantizedLinearMethod(), False
        n = output_size // self.tp_group.world_size
        self.weight = torch.nn.Parameter(torch.empty(n, input_size), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(n), False) if bias else None

    def forward(self, input_: Tensor) -> Any:
        if state.sp:
            module: Any = sys.modules["sglang.srt.layers.layernorm_sp"]
            return module.column_parallel_g_matmul(self, input_, self.bias), None
        return self.quant_method.apply(self, input_, self.bias), None


class RowParallelLinear(torch.nn.Module):
    def __init__(
        self, input_size: int, output_size: int, bias: bool = True, input_is_parallel: bool = True,
        skip_bias_add: bool = False, reduce_results: bool = True,
        use_dp_attention_reduce: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tp_group, self.reduce_results = state.tp_group, reduce_results
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.use_dp_attention_reduce, self.use_decode_attn_tp = use_dp_attention_reduce, False
        self.quant_method = UnquantizedLinearMethod()
        self.input_size_per_partition = input_size // self.tp_group.world_size
        shape = (output_size, self.input_size_per_partition)
        self.weight = torch.nn.Parameter(torch.empty(shape), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(output_size), False) if bias else None

    def forward(
        self, input_: Tensor, skip_all_reduce: bool = False, forward_batch: Any = None,
        output_tensor: Tensor | None = None,
    ) -> Any:  # fmt: skip
        rank, world = self.tp_group.rank_in_group, self.tp_group.world_size
        if not self.input_is_parallel:
            input_ = input_.chunk(world, -1)[rank].contiguous()
        bias = None if (rank > 0 or self.skip_bias_add) else self.bias
        behind = self.bias if self.skip_bias_add else None
        if state.sp and not skip_all_reduce and output_tensor is None:
            module: Any = sys.modules["sglang.srt.layers.layernorm_sp"]
            return module.row_parallel_gbar_matmul(self, input_, bias), behind
        y = self.quant_method.apply(self, input_, bias)
        if output_tensor is not None:
            y = output_tensor.copy_(y)
        if self.reduce_results and not skip_all_reduce and not state.skips:
            dist.all_reduce(y, group=self.tp_group.device_group)
        return y, behind


def column_parallel_g_matmul(linear: Any, input_parallel: Tensor, bias: Tensor | None) -> Tensor:
    world = linear.tp_group.world_size
    whole = input_parallel.new_empty((world * len(input_parallel), input_parallel.shape[1]))
    dist.all_gather_into_tensor(whole, input_parallel.contiguous(), linear.tp_group.device_group)
    y: Tensor = linear.quant_method.apply(linear, whole[: sp_num_tokens()], bias)
    return y


def row_parallel_gbar_matmul(linear: Any, input_: Tensor, bias: Tensor | None) -> Tensor:
    world = linear.tp_group.world_size
    x = torch.nn.functional.pad(input_, (0, 0, 0, -len(input_) % world))
    full = linear.quant_method.apply(linear, x, bias)
    dist.all_reduce(full, group=linear.tp_group.device_group)
    y: Tensor = full.chunk(world)[linear.tp_group.rank_in_group]
    return y


class ModelRunner:
    def __init__(self, model: torch.nn.Module, is_draft_worker: bool = False) -> None:
        self.model, self.is_draft_worker = model, is_draft_worker

    def alloc_memory_pool(self, memory_pool_config: Any = None) -> None:
        pass


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType) -> None:
        assert hook_type is HookType.AROUND
        _hooks[target] = hook


def hooks() -> dict[str, Any]:
    return _hooks


def apply_hooks() -> None:
    for target, hook in _hooks.items():
        owner, _, name = target.rpartition(".")
        place: Any = pkgutil.resolve_name(owner)
        setattr(place, name, _around(getattr(place, name), hook))


def connect(store: str, rank: int, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)


def connected() -> None:
    pass


def _around(original: Any, hook: Any) -> Any:
    def wrapper(*args: Any, **options: Any) -> Any:
        return hook(original, *args, **options)

    return wrapper


MODULES: dict[str, tuple[str, ...]] = {
    "sglang": ("__version__",),
    "sglang.srt": (),
    "sglang.srt.runtime_context": ("get_parallel", "get_exec", "get_schedule", "get_lora"),
    "sglang.srt.distributed": (),
    "sglang.srt.distributed.parallel_state": ("initialize_model_parallel",),
    "sglang.srt.model_executor": (),
    "sglang.srt.model_executor.model_runner": ("ModelRunner",),
    "sglang.srt.plugins": (),
    "sglang.srt.plugins.hook_registry": ("HookRegistry", "HookType"),
    "sglang.srt.layers": (),
    "sglang.srt.layers.linear": ("RowParallelLinear", "ColumnParallelLinear"),
    "sglang.srt.layers.layernorm_sp": (
        "layernorm_sp_enabled", "sp_num_tokens", "column_parallel_g_matmul",
        "row_parallel_gbar_matmul",
    ),
    "sglang.srt.layers.moe": (),
    "sglang.srt.layers.moe.utils": ("should_skip_mlp_all_reduce",),
    "sglang.srt.layers.quantization": (),
    "sglang.srt.layers.quantization.unquant": ("UnquantizedLinearMethod",),
}  # fmt: skip


def install() -> None:
    """Make the stand-ins importable as SGLang's modules."""
    make_modules(MODULES, globals())
