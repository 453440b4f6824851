"""torchtitan's debug Llama with ficco's overrides, held against torchtitan's own layers.

Attention is PyTorch's scaled_dot_product_attention, because torchtitan's runs on GPUs alone.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims, full_dtensor, parallel_dims, utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder_sharding import set_gqa_inner_attention_local_map
from torchtitan.models.common.rope import ComplexRoPE
from torchtitan.models.llama3 import llama3_configs, parallelize
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.tools import utils as tools
from torchtitan_check import BOTH, CHECKS, HEAD, Case

STEPS, TOKENS, BATCH = 5, 16, 3


class Setup(NamedTuple):
    """How a model is run.

    Attributes:
        backend: torchtitan's SPMD backend.
        sp: whether there is sequence parallelism.
        fused: whether queries, keys and values are one projection.
        dist_gemm: whether the overridden config is of torchtitan's own overlap, which no CPU runs.
        checkpoint: "full", "selective" or "no".
        compiled: whether torch.compile compiles each block.
        fsdp: whether FSDP shards parameters.
        typed: whether types are checked.
        tp, cp: the degrees of tensor and of context parallelism.
    """

    backend: str = "spmd_types"
    sp: bool = True
    fused: bool = True
    dist_gemm: bool = False
    checkpoint: str = "no"
    compiled: bool = False
    fsdp: bool = False
    typed: bool = False
    tp: int = 2
    cp: int = 1


SETUPS = {  # by name and number of ranks; a process has one backend, as torchtitan's have
    ("spmd_types", 2): [
        *[Setup(sp=sp, fused=fused) for sp in (True, False) for fused in (True, False)],
        Setup(dist_gemm=True), Setup(checkpoint="full"), Setup(checkpoint="selective", sp=False),
        Setup(compiled=True),
    ],
    ("partial_dtensor", 2): [Setup("partial_dtensor", on, on) for on in (True, False)],
    ("spmd_types", 4): [
        Setup(sp=sp, fsdp=True, typed=typed) for sp in (True, False) for typed in (True, False)
    ],
    ("context_parallel", 4): [Setup(cp=2), Setup(sp=False, fused=False, cp=2)],
    ("partial_dtensor", 4): [Setup("partial_dtensor", fsdp=True)],
    ("full_dtensor", 2): [Setup("full_dtensor", fsdp=True, tp=1)],
    ("full_dtensor", 4): [Setup("full_dtensor", sp, fsdp=True) for sp in (True, False)],
}  # fmt: skip


tools.device_type, parallel_dims.device_type = "cpu", "cpu"  # it would take GPUs


def blocks() -> None:
    """Run the checks that the stand-ins have, too."""
    utils.set_spmd_backend("spmd_types")

    def dims(tp: int) -> Any:
        return ParallelDims.from_config(
            ParallelismConfig(tensor_parallel_degree=tp), dist.get_world_size()
        )

    def context(dims: Any) -> Any:
        return utils.get_spmd_context(parallel_dims=dims)

    def rope() -> Any:
        return ComplexRoPE.Config(dim=HEAD, max_seq_len=64, theta=10000)

    case = Case(ScaledDotProductAttention.Config, rope, dims, context)
    for check in CHECKS.values():
        check(case)


class GatheredAttention(FlexAttention):
    """Attention to all keys of all ranks, for context parallelism; it replaces one for GPUs."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def __init__(self, config: Any) -> None:
        torch.nn.Module.__init__(self)

    def forward(
        self, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, *, enable_gqa: bool, **options: Any  # noqa: N803
    ) -> Any:  # fmt: skip
        heads = [each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH)]
        return scaled_dot_product_attention(*heads, enable_gqa=enable_gqa).transpose(1, 2)


class Results(NamedTuple):
    """What a model computed.

    Attributes:
        begun: its state_dict before the first step.
        logits, gradients: of the first step.
        losses: of all steps.
        ended: its state_dict after the last step.
    """

    begun: dict[str, torch.Tensor]
    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]
    losses: torch.Tensor
    ended: dict[str, torch.Tensor]


def llama(setups: str) -> None:
    """Run all setups of a name and the number of ranks."""
    for setup in SETUPS[setups, dist.get_world_size()]:
        wanted = run(setup._replace(dist_gemm=False), False)
        found = run(setup, True)
        assert list(found.begun) == list(wanted.begun), setup
        for name, value in wanted.begun.items():
            assert torch.equal(found.begun[name], value), f"{setup}: initial {name}"
        gap(found.logits, wanted.logits, 2e-6 if setup.compiled else 0, f"{setup}: logits")
        gap(found.losses, wanted.losses, 5e-6, f"{setup}: losses")
        assert found.gradients.keys() == wanted.gradients.keys(), setup
        for name, value in wanted.gradients.items():
            gap(found.gradients[name], value, 2e-6, f"{setup}: gradient of {name}")
        for name, value in wanted.ended.items():  # AdamW's first steps enlarge rounding errors
            gap(found.ended[name], value, 2e-3, f"{setup}: {name} after {STEPS} steps")


@cache
def dims_of(backend: str, tp: int, cp: int) -> Any:
    """Return torchtitan's meshes, which a process has once."""
    settings = ParallelismConfig(
        tensor_parallel_degree=tp, context_parallel_degree=cp, spmd_backend=backend
    )
    return ParallelDims.from_config(settings, dist.get_world_size())


def gap(found: torch.Tensor, wanted: torch.Tensor, within: float, about: str) -> None:
    off = (found - wanted).abs().max() / wanted.abs().max()
    assert off <= within, f"{about} is off by {off}, more than {within}"


def run(setup: Setup, ours: bool) -> Results:
    """Train a model for some steps."""
    utils.set_spmd_backend(setup.backend)
    settings = ParallelismConfig(
        tensor_parallel_degree=setup.tp, context_parallel_degree=setup.cp,
        enable_sequence_parallel=setup.sp, spmd_backend=setup.backend,
    )  # fmt: skip
    dims = dims_of(setup.backend, setup.tp, setup.cp)
    model = built(setup, ours, settings, dims)
    begun = whole(model.state_dict())
    context = utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=setup.typed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for step in range(STEPS):
        given = inputs(setup, dims, step)
        with context():
            logits = model(given[0], **given[2])
            with untyped(setup):
                y = logits.to_local() if isinstance(logits, DTensor) else logits
                loss = (y.tanh() * torch.linspace(-1, 1, y.shape[-1])).mean()
                loss.backward()
        if step == 0:
            first = y.detach().clone()
            gradients = whole({name: p.grad for name, p in model.named_parameters()})
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return Results(begun, first, gradients, torch.stack(losses), whole(model.state_dict()))


def built(setup: Setup, ours: bool, settings: Any, dims: Any) -> Any:
    """Return a model as torchtitan's trainer makes it."""
    config = llama3_configs["debugmodel"](attn_backend="varlen")
    config.layers = config.layers[:2]
    inner = GatheredAttention if setup.cp > 1 else ScaledDotProductAttention
    for layer in config.layers:
        attention, hidden = layer.attention, layer.feed_forward.w1.out_features
        init = layer.feed_forward.w1.param_init
        backend = "dist_gemm" if setup.dist_gemm else "default"
        layer.attention = make_gqa_config(
            dim=attention.dim, n_heads=16, n_kv_heads=4, wqkv_param_init=init, wo_param_init=init,
            inner_attention=inner.Config(), rope=attention.rope,
            fuse_qkv=setup.fused, tp_gemm_backend=backend,
        )  # fmt: skip
        layer.feed_forward = make_ffn_config(
            dim=attention.dim, hidden_dim=hidden, w1_param_init=init, w2w3_param_init=init,
            tp_gemm_backend=backend,
        )  # fmt: skip
    config.update_from_config(config=SimpleNamespace(parallelism=settings))
    for layer in config.layers:
        set_gqa_inner_attention_local_map(layer.attention.inner_attention)
    if ours:
        lines = apply_overrides(OverrideConfig(imports=BOTH), config)
        assert sum("-> Overlapped" in line for line in lines) == 4, lines
    with torch.device("meta"):
        model = config.build()
    model.verify_module_protocol()
    policies = {"full": FullAC.Config(), "selective": SelectiveAC.Config(), "no": None}
    apply_fsdp = parallelize.apply_fsdp_to_decoder
    if not setup.fsdp:
        parallelize.apply_fsdp_to_decoder = lambda *args, **options: None
    try:
        model = parallelize_llama(
            model, parallel_dims=dims, training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=settings, compile_config=CompileConfig(enable=setup.compiled),
            ac_config=policies[setup.checkpoint], dump_folder="",
        )  # fmt: skip
    finally:
        parallelize.apply_fsdp_to_decoder = apply_fsdp
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad(), utils.get_spmd_context(parallel_dims=dims)():
        model.init_weights(buffer_device=None)
    return model.train()


def inputs(setup: Setup, dims: Any, step: int) -> Any:
    """Return tokens, labels and positions; ranks of one tensor-parallel group have the same."""
    copy, part = divmod(dist.get_rank() // setup.tp, setup.cp)
    drawn = torch.Generator().manual_seed(100 * step + copy)
    words = torch.randint(2048, (BATCH, TOKENS + 1), generator=drawn)
    positions = torch.arange(TOKENS).repeat(BATCH, 1)
    tokens, labels, places = (
        each.chunk(setup.cp, 1)[part] for each in (words[:, :-1], words[:, 1:], positions)
    )
    given = tokens, labels, {"positions": places}
    if setup.backend == "spmd_types":
        return annotate_input_spmd_types(dims, *given)
    if setup.backend == "full_dtensor":
        return full_dtensor.parallelize_inputs(dims, *given)
    return given


@contextmanager
def untyped(setup: Setup) -> Any:
    """The loss here is no layer of torchtitan, and has no types."""
    if not setup.typed:
        yield
        return
    from torchtitan.protocols.sharding import spmd

    with spmd.no_typecheck():
        yield


def whole(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in tensors.items()
    }
