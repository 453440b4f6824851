"""Models of Hugging Face with experts on all ranks, by their own expert-parallel plans."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import ficco

LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "DeepseekV3": {
        **LATENT, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "moe_intermediate_size": 16,
    },
}  # fmt: skip


def loaded(name: str, folder: Path, **sizes: int) -> Any:
    """Return a model that transformers has split over the ranks."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers
    from transformers.distributed import DistributedConfig

    kind = getattr(transformers, f"{name}ForCausalLM")
    place = folder / f"{name}{'-'.join(sizes)}"
    if dist.get_rank() == 0:
        config = getattr(transformers, f"{name}Config")(
            vocab_size=20, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, num_experts_per_tok=2,
            **MODELS[name],
        )  # fmt: skip
        torch.manual_seed(0)
        kind(config).save_pretrained(place)
    dist.barrier()
    return kind.from_pretrained(place, distributed_config=DistributedConfig(**sizes))


def computed(net: Any, words: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return logits and gradients."""
    net.zero_grad()
    result = net(words, labels=words)
    result.loss.backward()
    found = {"logits": result.logits.detach()}
    for name, parameter in net.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
    return found


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], about: str) -> None:
    assert found.keys() == wanted.keys(), f"{about}: {found.keys() ^ wanted.keys()}"
    for name, tensor in found.items():
        gap = (tensor - wanted[name]).abs().max().item()
        assert gap <= 2e-5 * max(1.0, wanted[name].abs().max().item()), f"{about}, {name}: {gap}"


def experts(rank: int, world: int, folder: Path) -> None:
    """Values and gradients are as without ficco, for equal and for different tokens of ranks."""
    for name in MODELS:
        for sizes in ({"tp_size": world, "ep_size": world}, {"fsdp_size": world, "ep_size": world}):
            net, about = loaded(name, folder, **sizes), f"{name}, {sizes}"
            differ = "fsdp_size" in sizes
            generator = torch.Generator().manual_seed(rank if differ else 1)
            words = torch.randint(20, (3, 5 + 2 * rank * differ), generator=generator)
            exact = computed(net, words)
            ficco.overlap(net, strict=not differ)
            told = ficco.explain(net)
            where = "hold different tokens" if differ else "takes its part of the tokens"
            assert "experts of the Hugging Face plan -> moe over 2 ranks" in told, told
            assert where in told and "ep_dispatch_experts" not in told.partition("left")[2], told
            reserved = 0 if differ else ficco.reserve(net, words.numel())
            for _ in range(2):
                same(computed(net, words), exact, about)
            assert differ or reserved * world == ficco.window_bytes() > 0, about
            with torch.no_grad():
                logits = net(words).logits
            assert (logits - exact["logits"]).abs().max() < 2e-5, about
            ficco.restore(net)
            assert torch.equal(net(words).logits, exact["logits"]), about
    left(folder, world)


def left(folder: Path, world: int) -> None:
    """Experts that cannot run moe are listed with the reason."""
    net = loaded("Mixtral", folder, tp_size=world, ep_size=world)
    first, second = (layer.mlp.experts for layer in net.model.layers)
    first.has_bias, second.has_post_expert_norm = True, True
    told = ficco.explain(ficco.overlap(net))
    for words in ("its experts have biases", "its experts have a norm after them"):
        assert words in told, told
    ficco.restore(net)
    first.has_bias = False
    told = ficco.explain(ficco.overlap(net, schedule={"*.0.mlp.experts": None}))
    assert "schedule= says so" in told and "moe" not in told, told
