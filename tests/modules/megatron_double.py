"""Stand-ins for Megatron-Core's layers where it is not installed: its attributes, and its forwards.

They hold what Megatron's layers hold. `frameworks_worker.py` runs the same check on the real ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


def config(split: bool, fused: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        sequence_parallel=split, gradient_accumulation_fusion=fused,
        defer_embedding_wgrad_compute=False, _cpu_offloading_context=None,
        expert_model_parallel_size=1,
    )  # fmt: skip


class _Fused(torch.autograd.Function):
    """A product whose weight gradient is added to main_grad in one GEMM."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, group: Any, sums: bool) -> Any:
        ctx.save_for_backward(x)
        ctx.facts = weight, group, sums
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        (x,), (weight, group, sums) = ctx.saved_tensors, ctx.facts
        dx = dy @ weight
        if sums:
            dist.all_reduce(dx, group=group)
        total, rows = weight.main_grad, dy.flatten(0, -2)
        total.addmm_(rows.t().to(total.dtype), x.flatten(0, -2).to(total.dtype))
        return dx, None, None, None


class _Linear(torch.nn.Module):
    def __init__(
        self, shape: tuple[int, int], n: int, *, config: Any, skip_bias_add: bool, tp_group: Any,
        bias: bool = True, **rest: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.skip_bias_add, self.tp_group = config, skip_bias_add, tp_group
        self.is_expert = self.explicit_expert_comm = False
        self.sequence_parallel = config.sequence_parallel
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        self.weight = torch.nn.Parameter(torch.randn(shape))
        self.bias = torch.nn.Parameter(torch.zeros(n)) if bias else None

    def _linear(self, x: torch.Tensor, weight: Any, bias: Any = None) -> torch.Tensor:
        if not self.gradient_accumulation_fusion:
            return torch.nn.functional.linear(x, weight, bias)
        y: torch.Tensor = _Fused.apply(
            x, weight, self.tp_group, isinstance(self, ColumnParallelLinear)
        )
        return y if bias is None else y + bias


class ColumnParallelLinear(_Linear):
    def __init__(self, k: int, n: int, gather_output: bool = False, **shared: Any) -> None:
        mine = n // dist.get_world_size(shared["tp_group"])
        super().__init__((mine, k), mine, **shared)
        self.input_size, self.output_size_per_partition = k, mine
        self.gather_output, self.disable_grad_reduce = gather_output, False

    def forward(
        self, input_: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = self.weight if weight is None else weight
        if tuple(weight.shape) != tuple(self.weight.shape):
            raise RuntimeError(f"supplied weight's shape is {tuple(weight.shape)}")
        skips = self.skip_bias_add
        y = self._linear(input_, weight, None if skips else self.bias)
        if runtime_gather_output:
            parts = [torch.empty_like(y) for _ in range(dist.get_world_size(self.tp_group))]
            dist.all_gather(parts, y.detach().contiguous(), self.tp_group)
            y = torch.cat(parts, -1)
        return y, self.bias if skips else None


class RowParallelLinear(_Linear):
    def __init__(self, k: int, n: int, input_is_parallel: bool = True, **shared: Any) -> None:
        super().__init__((n, k // dist.get_world_size(shared["tp_group"])), n, **shared)
        self.input_is_parallel = input_is_parallel

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        y = self._linear(input_, self.weight)
        dist.all_reduce(y.detach(), group=self.tp_group)
        if self.skip_bias_add:
            return y, self.bias
        return y if self.bias is None else y + self.bias, None


class TELinear(torch.nn.Module):
    """A layer of Transformer Engine, of which there is the size of its group alone."""

    def __init__(self, tp_size: int) -> None:
        super().__init__()
        self.tp_size = tp_size
        self.weight = torch.nn.Parameter(torch.zeros(2, 2))
        self.weight.tensor_model_parallel = tp_size > 1  # type: ignore[attr-defined]


class TEColumnParallelLinear(TELinear): ...


class TERowParallelLinear(TELinear): ...


class TELayerNormColumnParallelLinear(TELinear): ...


# ---- what the specs of a GPT model are made of


class IdentityOp: ...


class _Norm: ...


class TENorm: ...


class TEDotProductAttention: ...


class TESpecProvider:
    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return TENorm

    def core_attention(self) -> type:
        return TEDotProductAttention


def get_gpt_layer_local_spec(
    *, qk_layernorm: bool, multi_latent_attention: bool, qk_l2_norm: bool
) -> SimpleNamespace:
    norm = _Norm if qk_layernorm else IdentityOp
    second = "kv_layernorm" if multi_latent_attention else "k_layernorm"
    attention = {"linear_proj": RowParallelLinear, "q_layernorm": norm, second: norm}
    attention |= {"core_attention": _Norm, "linear_qkv": ColumnParallelLinear}
    mlp = SimpleNamespace(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    layer = SimpleNamespace(
        input_layernorm=_Norm, pre_mlp_layernorm=_Norm,
        self_attention=SimpleNamespace(submodules=SimpleNamespace(**attention)),
        mlp=SimpleNamespace(submodules=mlp),
    )  # fmt: skip
    return SimpleNamespace(submodules=layer)


@contextmanager
def modules(*paths: str, **contents: Any) -> Iterator[None]:
    """Let Python find modules at dotted paths, all with these contents."""
    names = {name for path in paths for name in _parents(path)}
    kept = {name: sys.modules.get(name) for name in names}
    for name in sorted(names):
        made = ModuleType(name)
        made.__path__ = []
        vars(made).update(contents if name in paths else {})
        sys.modules[name] = made
    try:
        yield
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
