"""A rank that overlaps models of other libraries: python frameworks_worker.py STORE RANK WORLD WHAT.

WHAT is `transformers` or `megatron`.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import ficco


def close(found: torch.Tensor, wanted: torch.Tensor, about: str) -> None:
    assert found.shape == wanted.shape, f"{about}: {list(found.shape)}, not {list(wanted.shape)}"
    gap = (found.double() - wanted.double()).abs().max().item()
    assert gap <= 2e-5 * max(1.0, wanted.abs().max().item()), f"{about}: off by {gap}"


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def transformers(rank: int, world: int, folder: Path) -> None:
    """A Llama by its own plan: the same logits and gradients as one process computes."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    config = LlamaConfig(
        vocab_size=20, hidden_size=24, intermediate_size=36, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, attention_bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    one = LlamaForCausalLM(config)
    if rank == 0:
        one.save_pretrained(folder / "llama")
    dist.barrier()
    net = LlamaForCausalLM.from_pretrained(
        folder / "llama", distributed_config=DistributedConfig(tp_size=world)
    )
    words = torch.randint(20, (3, 7), generator=torch.Generator().manual_seed(1))
    wanted = one(words, labels=words)
    wanted.loss.backward()
    was = net(words, labels=words)
    was.loss.backward()
    before = {name: whole(p.grad).clone() for name, p in net.named_parameters()}
    net.zero_grad()
    ficco.overlap(net, strict=True)
    told = ficco.explain(net)
    assert "colwise of the Hugging Face plan" in told and "{q_proj, k_proj, v_proj}" in told, told
    for _ in range(2):
        net.zero_grad()
        found = net(words, labels=words)
        found.loss.backward()
        close(found.logits, wanted.logits, "logits")
        exact = dict(one.named_parameters())
        for name, parameter in net.named_parameters():
            close(whole(parameter.grad), before[name], f"gradient of {name}, without ficco")
            close(whole(parameter.grad), exact[name].grad, f"gradient of {name}")
    with torch.no_grad():
        close(net(words).logits, wanted.logits, "logits without gradients")
    ficco.restore(net)
    assert torch.equal(net(words).logits, was.logits)


def megatron(rank: int, world: int, folder: Path) -> None:
    """Column and row layers, with and without sequence parallelism, against float64."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import layers

    class Pair(torch.nn.Module):
        def __init__(self, split: bool, skip: bool) -> None:
            super().__init__()
            config = ModelParallelConfig(
                tensor_model_parallel_size=world,
                sequence_parallel=split,
                use_cpu_initialization=True,
            )
            shared: dict[str, Any] = {
                "config": config, "init_method": torch.nn.init.normal_, "bias": True,
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
        up, down, first = (_all(t) for t in (pair.up.weight, pair.down.weight, pair.up.bias))
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


def _all(mine: torch.Tensor) -> torch.Tensor:
    """Return all ranks' shards below one another."""
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine.detach())
    return torch.cat(found)


def main() -> None:
    store, rank, world, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    check: Any = {"transformers": transformers, "megatron": megatron}[what]
    check(rank, world, Path(store).parent)
    ficco.close()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main()
