"""Stand-ins for Megatron-Core's layers where it is not installed: its attributes, and its forwards.

They hold what Megatron's layers hold. `frameworks_worker.py` runs the same check on the real ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


def config(split: bool) -> SimpleNamespace:
    return SimpleNamespace(
        sequence_parallel=split, gradient_accumulation_fusion=False,
        defer_embedding_wgrad_compute=False, _cpu_offloading_context=None,
        expert_model_parallel_size=1,
    )  # fmt: skip


class _Linear(torch.nn.Module):
    def __init__(
        self, shape: tuple[int, int], n: int, *, config: Any, skip_bias_add: bool, tp_group: Any,
        **rest: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.skip_bias_add, self.tp_group = config, skip_bias_add, tp_group
        self.is_expert = self.explicit_expert_comm = False
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.randn(shape))
        self.bias = torch.nn.Parameter(torch.zeros(n))


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
        y = torch.nn.functional.linear(input_, weight, None if skips else self.bias)
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
        y = torch.nn.functional.linear(input_, self.weight)
        dist.all_reduce(y.detach(), group=self.tp_group)
        return (y, self.bias) if self.skip_bias_add else (y + self.bias, None)
