"""A small Llama-like model for the tests of overlap(), and the ways to make it tensor-parallel."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCABULARY, WIDTH, HEADS, HIDDEN = 20, 24, 4, 36


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.wk = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wv = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (-1, WIDTH // HEADS)
        q, k, v = (w(x).unflatten(-1, split).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(WIDTH), Attention(bias)
        self.mlp_norm, self.mlp = Norm(WIDTH), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, layers: int = 2, bias: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block(bias) for _ in range(layers)])
        self.norm, self.output = Norm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def plain(model: Llama, mesh: object) -> Llama:
    """Without sequence parallelism: activations are whole on all ranks."""
    for block in model.layers:
        plan = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel()}
        plan |= {"attention.wo": RowwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    whole = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh, {"output": whole})


def sequence(model: Llama, mesh: object) -> Llama:
    """With sequence parallelism; a parent's input is gathered before it, once for its layers."""
    split, gather = Shard(1), {"desired_input_layouts": (Replicate(),)}
    for block in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(split,), **gather),
            "attention.wo": RowwiseParallel(output_layouts=split),
            "mlp_norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(split,), **gather),
            "mlp.down": RowwiseParallel(output_layouts=split),
        }
        plan |= {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
        parallelize_module(block, mesh, plan)
    top = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=split),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=split, output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, top)


def each_gathers(model: Llama, mesh: object) -> Llama:
    """With sequence parallelism; every column layer is told that its input is split."""
    split = Shard(1)
    for block in model.layers:
        names = ("attention.wq", "attention.wk", "attention.wv", "mlp.gate", "mlp.up")
        plan = {name: ColwiseParallel(input_layouts=split) for name in names}
        plan |= {
            "attention_norm": SequenceParallel(use_local_output=True),
            "attention.wo": RowwiseParallel(output_layouts=split),
            "mlp_norm": SequenceParallel(),
            "mlp.down": RowwiseParallel(output_layouts=split),
        }
        parallelize_module(block, mesh, plan)
    top = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=split),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=split, output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, top)
