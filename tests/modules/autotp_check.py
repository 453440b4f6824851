"""Layers of DeepSpeed's AutoTP, overlapped: held against their own forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ficco

__all__ = ["autotp_layers", "autotp_left"]


def autotp_layers(
    rank: int, world: int, layers: Any, biases: Sequence[bool] = (True, False)
) -> None:
    """Check a column layer before a row layer, of uneven shards, with biases and without.

    Args:
        rank: of this process.
        world: how many there are.
        layers: has LinearLayer and LinearAllreduce.
        biases: with biases, without, or both.
    """
    sizes = [3 + each for each in range(world)]
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    for biased in biases:
        drawn = torch.Generator().manual_seed(5)
        up = torch.randn((sum(sizes), 6), generator=drawn)
        down = torch.randn((5, sum(sizes)), generator=drawn)
        bias, last = torch.randn(sum(sizes), generator=drawn), torch.randn(5, generator=drawn)
        plain, ours = (
            nn.Sequential(
                layers.LinearLayer(up[mine], bias[mine] if biased else None, dist.group.WORLD),
                nn.GELU(),
                layers.LinearAllreduce(down[:, mine], last if biased else None, dist.group.WORLD),
            )
            for _ in range(2)
        )
        ficco.overlap(ours, strict=True)
        told = ficco.explain(ours)
        assert "LinearLayer -> column_matmul" in told, told
        assert "LinearAllreduce -> matmul_all_reduce" in told, told
        x, scale = torch.randn((2, 4, 6), generator=drawn), torch.randn((2, 4, 5), generator=drawn)
        results = []
        for model in (plain, ours):
            each = x.clone().requires_grad_()
            y = model(each)
            (y * scale).sum().backward()
            gradients = [p.grad for p in model.parameters()]
            assert all(gradient is not None for gradient in gradients)
            results.append([y.detach(), each.grad, *gradients])
        for number, (wanted, found) in enumerate(zip(*results, strict=True)):
            gap = (wanted - found).abs().max()
            assert gap <= 1e-4, f"biased {biased}, result {number}: off by {gap}"
        assert list(ours.state_dict()) == list(plain.state_dict())
        ficco.restore(ours)
        assert torch.equal(ours(x), plain(x)), "a restored layer differs"


def autotp_left(layers: Any) -> None:
    """Check that layers which send in other ways are left, each with its reason."""
    weight, group = torch.ones(4, 4), dist.group.WORLD

    def changed(**facts: Any) -> nn.Module:
        layer: nn.Module = layers.LinearLayer(weight, None, group)
        layer.__dict__ |= facts
        return layer

    sharded = layers.LinearLayer(weight, None, group)
    sharded.weight.ds_id = 3
    for layer, why in (
        (changed(gather_output=True), "it gathers its output"),
        (changed(defer_collectives_to_compiler=True), "DeepSpeed's compiler"),
        (changed(forward=lambda input: input), "its forward was already replaced"),
        (sharded, "ZeRO-3 holds its weight in shards"),
        (layers.LmHeadLinearAllreduce(weight, None, group), "has a forward of its own"),
    ):
        model = nn.Sequential(layers.LinearLayer(weight, None, group), layer)
        told = ficco.explain(ficco.overlap(model))
        assert why in told, (why, told)
        ficco.restore(model)
        try:
            ficco.overlap(model, strict=True)
        except ficco.InputError as error:
            assert why in str(error), error
        else:
            raise AssertionError(f"strict accepted a layer although {why}")
