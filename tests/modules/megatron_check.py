"""Megatron-Core's layers, or stand-ins for them, overlapped: held against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ficco


def megatron_layers(rank: int, world: int, layers: Any, config_of: Callable[[bool], Any]) -> None:
    """Check column and row layers, with and without sequence parallelism.

    Args:
        rank: of this process.
        world: how many there are.
        layers: has ColumnParallelLinear and RowParallelLinear.
        config_of: makes their configuration, with sequence parallelism or without.
    """

    class Pair(torch.nn.Module):
        def __init__(self, split: bool, skip: bool) -> None:
            super().__init__()
            shared: dict[str, Any] = {
                "config": config_of(split), "init_method": torch.nn.init.normal_, "bias": True,
                "skip_bias_add": skip, "tp_group": dist.group.WORLD,
            }  # fmt: skip
            self.up = layers.ColumnParallelLinear(6, 4 * world, **shared)
            self.down = layers.RowParallelLinear(4 * world, 5, input_is_parallel=True, **shared)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, bias = self.up(x)
            z, last = self.down(y if bias is None else y + bias)
            return z if last is None else z + last

    for split, skip in ((False, False), (False, True), (True, False), (True, True)):
        about = f"sequence_parallel={split}, skip_bias_add={skip}"
        torch.manual_seed(3)
        pair = Pair(split, skip)
        torch.nn.init.normal_(pair.up.bias)
        torch.nn.init.normal_(pair.down.bias)
        dist.broadcast(pair.down.bias.data, 0)
        ficco.overlap(pair, strict=True)
        told = ficco.explain(pair)
        assert "ColumnParallelLinear" in told and "RowParallelLinear" in told, told
        drawn = torch.Generator().manual_seed(5)
        x = torch.randn((3 * world, 2, 6), generator=drawn)
        scale = torch.randn((3 * world, 2, 5), generator=drawn)
        rows = slice(3 * rank, 3 * rank + 3) if split else slice(None)
        mine = x[rows].clone().requires_grad_()
        z = pair(mine)
        (z * scale[rows]).sum().backward()
        up, down, first = (gathered(t) for t in (pair.up.weight, pair.down.weight, pair.up.bias))
        exact = [t.double().requires_grad_() for t in (x, up, first, torch.cat(
            list(down.chunk(world)), 1), pair.down.bias.detach())]  # fmt: skip
        wanted = (exact[0] @ exact[1].t() + exact[2]) @ exact[3].t() + exact[4]
        (wanted * scale).sum().backward()
        close(z, wanted[rows], about)
        close(mine.grad, exact[0].grad[rows], f"{about}, gradient of x")
        columns = slice(4 * rank, 4 * rank + 4)
        close(pair.up.weight.grad, exact[1].grad[columns], f"{about}, gradient of up")
        close(pair.up.bias.grad, exact[2].grad[columns], f"{about}, gradient of up's bias")
        close(pair.down.weight.grad, exact[3].grad[:, columns], f"{about}, gradient of down")
        last = pair.down.bias.grad  # of this rank's rows: Megatron sums it after backward
        if split:
            dist.all_reduce(last)
        close(last, exact[4].grad, f"{about}, gradient of down's bias")
        ficco.restore(pair)
        assert "forward" not in pair.up.__dict__
        if not split:  # Megatron's own collectives for sequences want GPUs
            close(pair(mine), wanted[rows], f"{about}, restored")


def close(
    found: torch.Tensor, wanted: torch.Tensor, about: str, dtype: torch.dtype = torch.float32
) -> None:
    assert found.shape == wanted.shape, f"{about}: {list(found.shape)}, not {list(wanted.shape)}"
    if wanted.numel():
        gap = (found.double() - wanted.double()).abs().max().item()
        most = 2e-5 if dtype == torch.float32 else 2e-2
        assert gap <= most * max(1.0, wanted.abs().max().item()), f"{about}: off by {gap}"


def gathered(mine: torch.Tensor) -> torch.Tensor:
    """Return all ranks' shards below one another."""
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine.detach())
    return torch.cat(found)
