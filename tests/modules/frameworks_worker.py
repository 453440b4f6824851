"""A rank that overlaps models of other libraries.

python frameworks_worker.py STORE RANK WORLD WHAT; WHAT is `transformers`, `families`,
`experts`, `peft`, `megatron`, `deepspeed`, or `torchtitan` and a name of setups in
`torchtitan_llama.py`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from joining import join_gloo
from torch.distributed.tensor import DTensor

import ficco
from ficco.core.private.frameworks import TRANSFORMER_ENGINE

sys.path.insert(0, str(Path(__file__).parent))
from autotp_check import autotp_layers, autotp_left
from experts_check import experts
from megatron_check import megatron_layers
from megatron_double import modules
from megatron_fused_check import EXTENSION, gemm, layer_of, main_grads, main_grads_refused
from megatron_spec_check import NAME, megatron_spec


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


WORDS = torch.randint(20, (3, 7), generator=torch.Generator().manual_seed(1))


def loaded(name: str, folder: Path, **options: Any) -> tuple[Any, Any]:
    """Return a model of one process, and the same split over two ranks by its own plan."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers
    from transformers.distributed import DistributedConfig

    config = getattr(transformers, f"{name}Config")(
        vocab_size=20, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, **options,
    )  # fmt: skip
    kind = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    one = kind(config)
    if dist.get_rank() == 0:
        one.save_pretrained(folder / name)
    dist.barrier()
    net = kind.from_pretrained(folder / name, distributed_config=DistributedConfig(tp_size=2))
    return one, net


def computed(net: Any) -> dict[str, torch.Tensor]:
    """Return logits and gradients; names are those without adapters."""
    net.zero_grad()
    result = net(WORDS, labels=WORDS)
    result.loss.backward()
    found = {name: whole(p.grad) for name, p in net.named_parameters() if p.grad is not None}
    return {"logits": result.logits, **found}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], about: str) -> None:
    assert found.keys() == wanted.keys(), f"{about}: {found.keys() ^ wanted.keys()}"
    for name, tensor in found.items():
        close(tensor, wanted[name], f"{about}, {name}")


FAMILIES: dict[str, dict[str, Any]] = {
    "Phi3": {},
    "Qwen3": {"head_dim": 8},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": {
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
        "n_shared_experts": 1,
    },
}  # fmt: skip
EXPERTS = ("moe_tp_experts", "packed_colwise", "rowwise of the Hugging Face plan): it is a param")


def families(rank: int, world: int, folder: Path) -> None:
    """Every entry of a plan is overlapped or listed; values and gradients are as without ficco."""
    for name, options in FAMILIES.items():
        one, net = loaded(name, folder, **options)
        same(computed(net), exact := computed(one), f"{name} without ficco")
        if any("experts" in key for key in net._tp_plan):
            try:
                ficco.overlap(net, strict=True)
            except ficco.InputError as error:
                assert all(each in str(error) for each in EXPERTS), error
                assert "kv_a_proj" not in str(error), error
            else:
                raise AssertionError(f"{name}: strict took experts whose results are summed")
            ficco.overlap(net)
        else:
            ficco.overlap(net, strict=True)
        told = ficco.explain(net)
        for pattern in net._tp_plan:
            leaf = pattern.rpartition(".")[2]
            assert leaf in told or not any(leaf in key for key in exact), f"{leaf}: {told}"
        assert name != "Phi3" or "rowwise_split_input of the Hugging Face plan -> matmul" in told
        same(computed(net), exact, f"{name} with ficco")

    class Pair(torch.nn.Module):
        def __init__(self, policy: Any, reference: Any) -> None:
            super().__init__()
            self.policy, self.reference = policy, reference

    pair = Pair(loaded("Llama", folder)[1], loaded("Phi3", folder)[1])
    wanted = [computed(pair.policy), computed(pair.reference)]
    told = ficco.explain(ficco.overlap(pair, strict=True))
    assert "24 of 24" in told and "policy.lm_head" in told and "reference.lm_head" in told, told
    same(computed(pair.policy), wanted[0], "policy")
    same(computed(pair.reference), wanted[1], "reference")
    sharded = loaded("Llama", folder)[0]  # whole on every rank, but for FSDP
    torch.distributed.fsdp.fully_shard(sharded)
    try:
        ficco.overlap(sharded)
    except ficco.InputError as error:
        assert "no tensor-parallel layer" in str(error), error
    else:
        raise AssertionError("a model that FSDP alone has split was taken")


COLUMNS, ROWS = ["q_proj", "v_proj", "up_proj"], ["o_proj", "down_proj"]


def peft(rank: int, world: int, folder: Path) -> None:
    """LoRA before overlap() and after it, as in one process.

    Without ficco, transformers 5.24 cannot train the row adapters that PEFT 0.21 makes: it takes
    the sizes of a shard for those of the whole. They are right without gradients.
    """
    from peft import LoraConfig, get_peft_model

    def adapted(net: Any, targets: list[str]) -> Any:
        torch.manual_seed(2)
        return get_peft_model(net, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))

    def expected(net: Any, targets: list[str]) -> dict[str, torch.Tensor]:
        one = adapted(loaded("Llama", folder)[0], targets)
        adapters = {name: whole(p.data) for name, p in net.named_parameters() if "lora_" in name}
        one.load_state_dict(adapters, strict=False)
        return computed(one)

    net = adapted(loaded("Llama", folder)[1], COLUMNS + ROWS)
    exact = expected(net, COLUMNS + ROWS)
    ficco.overlap(net, strict=True)
    told = ficco.explain(net)
    for name in ("q_proj.base_layer", "q_proj.lora_B.default", "o_proj.lora_A.default", "k_proj"):
        assert name in told, f"{name}: {told}"
    assert "25 of 25" in told and "q_proj.lora_A" not in told, told
    same(computed(net), exact, "LoRA before overlap()")
    ficco.restore(net)
    with torch.no_grad():
        close(net(WORDS).logits, exact["logits"], "LoRA, restored")
    net = adapted(ficco.overlap(loaded("Llama", folder)[1], strict=True), COLUMNS)
    exact = expected(net, COLUMNS)
    same(computed(net), exact, "LoRA after overlap()")
    told = ficco.explain(net)
    assert "15 of 21" in told and "it was added after overlap()" in told, told
    net = adapted(ficco.overlap(loaded("Llama", folder)[1]), COLUMNS + ROWS)
    exact = expected(net, COLUMNS + ROWS)
    with torch.no_grad():
        close(net(WORDS).logits, exact["logits"], "LoRA of rows after overlap()")


def megatron_data_parallel(layers: Any, config: Any) -> None:
    """Megatron's DistributedDataParallel: two microbatches, whose hooks see each gradient once."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    for kind, early in (("Column", False), ("Column", True), ("Row", False), ("Row", True)):
        found = []
        for overlapped in (False, True):
            layer = layer_of(layers, kind, config)
            del layer.weight.main_grad  # the wrapper makes it
            if overlapped:
                ficco.overlap(layer, strict=True, schedule="hetero_fused_1d")
            options = DistributedDataParallelConfig(overlap_grad_reduce=early)
            net = DistributedDataParallel(config, options, torch.nn.Sequential(layer))
            for rows in (160, 40):
                with torch.random.fork_rng():
                    torch.manual_seed(rows)
                    y = layer(torch.randn(rows, 2, layer.weight.shape[1], requires_grad=True))[0]
                    y.backward(torch.randn(y.shape))
            net.finish_grad_sync()
            assert layer.weight.grad is None and layer.weight.main_grad.any()
            found.append(layer.weight.main_grad)
        assert torch.equal(*found), f"{kind}, overlap_grad_reduce={early}"


def megatron(rank: int, world: int, folder: Path) -> None:
    """Megatron-Core's own layers, and the spec of a GPT model made of them.

    Its layers with gradient_accumulation_fusion need a compiled module; here is a stand-in. They
    make buffers on the current GPU, for which the CPU is given.
    """
    sys.modules[EXTENSION] = gemm([])  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    from megatron.core import parallel_state, utils
    from megatron.core.extensions import transformer_engine
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import TransformerConfig, spec_utils
    from packaging.version import Version

    def config(split: bool, fused: bool = False) -> Any:
        return ModelParallelConfig(
            tensor_model_parallel_size=world, sequence_parallel=split, use_cpu_initialization=True,
            gradient_accumulation_fusion=fused,
        )  # fmt: skip

    megatron_layers(rank, world, layers, config)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    main_grads(layers, config, real=True)
    main_grads_refused(layers, config)
    assert all(hasattr(transformer_engine, name) for name in TRANSFORMER_ENGINE)
    utils.get_te_version = lambda: Version("2.9")
    whole = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=4, use_cpu_initialization=True,
        tensor_model_parallel_size=world, sequence_parallel=True,
    )  # fmt: skip
    sys.modules[EXTENSION] = gemm([])  # type: ignore[assignment]
    megatron_data_parallel(layers, replace(whole, gradient_accumulation_fusion=True))
    spec = megatron_spec(modules)
    transformer_engine.HAVE_TE = True
    read = spec_utils.import_module([NAME, "gpt_spec"])
    assert type(read) is type(spec) is spec_utils.ModuleSpec
    mlp = spec_utils.build_module(
        spec.submodules.mlp, config=whole, tp_group=dist.group.WORLD, ffn_hidden_size=16
    )
    told = ficco.explain(ficco.overlap(mlp, strict=True))
    assert "linear_fc1" in told and "linear_fc2" in told, told


def deepspeed(rank: int, world: int, folder: Path) -> None:
    """The layers of DeepSpeed's AutoTP, with collectives of PyTorch: its own need compiled code."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.comm import comm
    from deepspeed.module_inject import layers

    sums = dict.fromkeys(("all_reduce", "inference_all_reduce"), dist.all_reduce)
    sizes = {name: getattr(dist, name) for name in ("get_rank", "get_world_size")}
    layers.dist = comm.cdb = SimpleNamespace(**sums, **sizes, is_initialized=lambda: True)

    def made(kind: Any) -> Any:
        def layer(weight: Any, bias: Any, group: Any, **more: Any) -> Any:
            linear = torch.nn.Linear(world * 8, world * 8, bias=bias is not None)
            found = kind(linear, mp_group=group, name="layer", **more)
            for name, value in (("weight", weight), ("bias", bias)):
                if value is not None:
                    setattr(found, name, torch.nn.Parameter(value.clone()))
            return found

        return layer

    names = ("LinearLayer", "LinearAllreduce", "LmHeadLinearAllreduce")
    given = SimpleNamespace(**{name: made(getattr(layers, name)) for name in names})
    # With a bias its own row layer fails where gradients are recorded: it adds in place to a view.
    autotp_layers(rank, world, given, biases=(False,))
    autotp_left(given)


def torchtitan(rank: int, world: int, folder: Path, name: str) -> None:
    """A block as the stand-ins have it, and a whole Llama; four ranks are two by two with FSDP."""
    from torchtitan_llama import blocks, llama

    if world == 2 and name == "spmd_types":
        blocks()
    llama(name)


def main() -> None:
    store, rank, world, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    join_gloo(store, rank, world)
    check: Any = experts if what == "experts" else globals()[what]
    check(rank, world, Path(store).parent, *sys.argv[5:])
    ficco.close()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main()
