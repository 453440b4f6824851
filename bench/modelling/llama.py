"""Blocks of Llama 3 in their real sizes, tensor-parallel by PyTorch, with shared weights.

Activations are [tokens, width], split by tokens. With a separate dimension for a batch of 1,
torch.compile does not fuse an all-gather with the GEMMs after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

Tensor = torch.Tensor


@dataclass(frozen=True)
class Size:
    """A model's sizes.

    Attributes:
        width, hidden: elements of the residual stream and of the MLP.
        heads, kv_heads: number of heads of queries; of keys and values.
        head: elements of one head.
        depth: layers of the whole model.
        layers: number of measured layers.
    """

    width: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    depth: int
    layers: int = 4


SIZES = {
    "8B": Size(4096, 14336, 32, 8, 128, 32),
    "70B": Size(8192, 28672, 64, 8, 128, 80),
    "tiny": Size(64, 96, 8, 4, 8, 2, 2),
}


class Norm(nn.Module):
    """An RMSNorm of this rank's rows; every rank has the whole weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return x [rows, width], normalized."""
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary angles (cosines, sines) to heads [tokens, heads, head]."""
    cos, sin = angles[0, :, None], angles[1, :, None]
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class Attention(nn.Module):
    """Grouped attention: causal over its input, or one token over a cache of fixed length."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.head
        self.wq = nn.Linear(size.width, size.heads * size.head, bias=False)
        self.wk = nn.Linear(size.width, size.kv_heads * size.head, bias=False)
        self.wv = nn.Linear(size.width, size.kv_heads * size.head, bias=False)
        self.wo = nn.Linear(size.heads * size.head, size.width, bias=False)
        self.cache: Any = None  # keys and values [batch, heads, length, head] for decoding

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Return [tokens, width], from [tokens, width] and rotary angles [2, tokens or 1, head]."""
        q, k, v = (w(x).unflatten(-1, (-1, self.head)) for w in (self.wq, self.wk, self.wv))
        q, k = turned(q, angles), turned(k, angles)
        group = q.shape[1] // k.shape[1]
        attend = nn.functional.scaled_dot_product_attention
        if self.cache is None:
            k, v = (t[:, :, None].expand(-1, -1, group, -1).flatten(1, 2) for t in (k, v))
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
            y = attend(q, k, v, is_causal=True)[0].transpose(0, 1)
        else:
            keys, values = self.cache
            keys[:, :, -1] = k
            values[:, :, -1] = v
            # One token: the heads of a group take the place of the sequence dimension.
            y = attend(q.unflatten(1, (-1, group)), keys, values).flatten(1, 2)
        return self.wo(y.flatten(-2))


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, width], from [rows, width]."""
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(size.width), Attention(size)
        self.mlp_norm, self.mlp = Norm(size.width), Mlp(size)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Return x [rows, width] plus attention and MLP."""
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.mlp(self.mlp_norm(x))


class Blocks(nn.Module):
    """A sequence of layers, without embedding and output projection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(size) for _ in range(size.layers)])

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Return x [rows, width] after all layers."""
        for layer in self.layers:
            x = layer(x, angles)
        return x


def split_plan() -> dict[str, Any]:
    """Tensor and sequence parallel: a block's input and output are this rank's rows."""
    split = Shard(0)
    plan: dict[str, Any] = {
        "attention": PrepareModuleInput(
            input_layouts=(split, None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.wo": RowwiseParallel(output_layouts=split),
        "mlp": PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(Replicate(),)),
        "mlp.down": RowwiseParallel(output_layouts=split),
    }
    plan |= {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    return plan | {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}


def whole_plan() -> dict[str, Any]:
    """Tensor parallel: a block's input and output are all rows on every rank, by all-reduce."""
    columns = ("attention.wq", "attention.wk", "attention.wv", "mlp.gate", "mlp.up")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    return plan | {name: RowwiseParallel() for name in ("attention.wo", "mlp.down")}


def made(size: Size, mesh: Any, split: bool, dtype: torch.dtype) -> Blocks:
    """Return a parallel model with weights of variance 1 / inputs, equal in every call."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(mesh.device_type):
            model = Blocks(size)
    finally:
        torch.set_default_dtype(before)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
    for block in model.layers:
        # Every rank has drawn the same weights and keeps its part; nothing is sent.
        parallelize_module(block, mesh, split_plan() if split else whole_plan(), src_data_rank=None)
    return model


def share_weights(model: nn.Module, owner: nn.Module) -> None:
    """Replace a model's parameters by those of an equal model."""
    for mine, theirs in zip(model.modules(), owner.modules(), strict=True):
        for name, parameter in theirs.named_parameters(recurse=False):
            mine.register_parameter(name, parameter)


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a parameter or gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def angles_of(size: Size, length: int, first: int, device: str, dtype: torch.dtype) -> Tensor:
    """Return cosines and sines [2, length, head] of positions from `first` on."""
    rates = 500000.0 ** (-torch.arange(0, size.head, 2, device=device) / size.head)
    turns = torch.arange(first, first + length, device=device)[:, None] * rates
    turns = torch.cat((turns, turns), -1)
    return torch.stack((turns.cos(), turns.sin())).to(dtype)
