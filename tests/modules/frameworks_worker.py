"""A rank that overlaps models of other libraries.

python frameworks_worker.py STORE RANK WORLD WHAT; WHAT is `transformers` or `megatron`.
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

sys.path.insert(0, str(Path(__file__).parent))
from megatron_check import megatron_layers


def close(found: torch.Tensor, wanted: torch.Tensor, about: str) -> None:
    assert found.shape == wanted.shape, f"{about}: {list(found.shape)}, not {list(wanted.shape)}"
    gap = (found.double() - wanted.double()).abs().max().item()
    assert gap <= 2e-5 * max(1.0, wanted.abs().max().item()), f"{about}: off by {gap}"


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def transformers(rank: int, world: int, folder: Path) -> None:
    """A Llama by its own plan: the same logits and gradients as one process computes.

    Four ranks are two by two: FSDP by Hugging Face, and tensor parallelism within it.
    """
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
        folder / "llama",
        distributed_config=DistributedConfig(tp_size=2, fsdp_size=world // 2),
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
    """Megatron-Core's own layers."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import layers

    def config(split: bool) -> Any:
        return ModelParallelConfig(
            tensor_model_parallel_size=world, sequence_parallel=split, use_cpu_initialization=True
        )

    megatron_layers(rank, world, layers, config)


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
