"""Stand-ins for the layers of DeepSpeed's AutoTP: their attributes, forwards and gradients.

`import deepspeed` takes 20 seconds, and compiles code on a CPU, so CI has these.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _SumsForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, x: torch.Tensor) -> torch.Tensor:
        summed = x.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return None, dy


class _SumsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        summed = dy.clone()
        dist.all_reduce(summed, group=ctx.group)
        return None, summed


class _Layer(torch.nn.Module):
    tp_overlap_comm = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, group: Any) -> None:
        super().__init__()
        self.mp_group, self.tp_index = group, dist.get_rank(group)
        self.tp_world_size = dist.get_world_size(group)
        self.is_tp_parallel = self.tp_world_size > 1
        self.defer_collectives_to_compiler = False
        self.weight = torch.nn.Parameter(weight.clone())
        self.bias = None if bias is None else torch.nn.Parameter(bias.clone())


class LinearLayer(_Layer):
    """Holds some columns of the result: rows of the weight."""

    def __init__(self, *given: Any, gather_output: bool = False) -> None:
        super().__init__(*given)
        self.gather_output = gather_output

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = _SumsBackward.apply(self.mp_group, input)
        y = torch.matmul(x, self.weight.transpose(-1, -2))
        return y if self.bias is None else y + self.bias


class LinearAllreduce(_Layer):
    """Holds some columns of the weight, and the whole bias."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = torch.matmul(input, self.weight.transpose(-1, -2))
        y = _SumsForward.apply(self.mp_group, y)
        return y if self.bias is None else y + self.bias


class LmHeadLinearAllreduce(LinearAllreduce):
    """As DeepSpeed's subclasses, it has a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)
