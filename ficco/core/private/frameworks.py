"""What ficco uses of other frameworks: private attributes of their objects, names, releases.

If an attribute is absent, `getattr` and `get` return None. Modules of `ficco.integrations` check
the names that they need by `why_unusable`; if one is absent, they leave the framework unchanged.
`ficco doctor --frameworks` lists all of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

from ficco.core.private.finding import resolve

OFFLOADING = "_cpu_offloading_context"
"""Attribute of a Megatron-Core config, set while activations are offloaded. Layers are then left
unchanged.
"""

FUSION = "gradient_accumulation_fusion"
"""Attribute of a Megatron-Core layer and its config: the gradient of its weight is added to its
`main_grad` during backward."""

MAIN_GRAD, ADDED, ZERO_DUMMY = "main_grad", "grad_added_to_main_grad", "zero_out_wgrad"
"""Attributes of a Megatron-Core weight: the buffer of its gradient, whether a backward has added to
it, and whether the dummy that autograd gets then must be zero, because something is added to it."""

FSDP_PARAMETER = "__fsdp_param__"
"""Attribute of a weight of Megatron-FSDP, whose main_grad exists only during backward."""


def accumulating_gemm(single: bool) -> Callable[[Any, Any, Any], None] | None:
    """Return Megatron's function(x, dy, main_grad) that adds dy^T x; None: it is not installed.

    `single`: whether main_grad is float32; else it has the dtype of x and dy.
    """
    library = sys.modules.get("fused_weight_gradient_mlp_cuda")  # Megatron imports it
    return getattr(library, f"wgrad_gemm_accum_fp{32 if single else 16}", None)


TRANSFORMER_ENGINE = (
    "TEColumnParallelLinear",
    "TERowParallelLinear",
    "TELayerNormColumnParallelLinear",
)
"""Classes of Megatron-Core that are linear layers of Transformer Engine."""

LAYER_SPEC = "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_spec"
HAVE_ENGINE = "megatron.core.extensions.transformer_engine:HAVE_TE"
SPEC_PROVIDER = "megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider"
"""What `ficco.integrations.megatron` uses of Megatron-Core: the spec of a layer of its own modules,
whether Transformer Engine is installed, and the list of its modules."""

SPLIT = "tensor_model_parallel"
"""Attribute of a Megatron-Core parameter: whether it is split over the tensor-parallel group."""

TP_PLAN, EP_PLAN, DEVICE_MESH = "_tp_plan", "_ep_plan", "_device_mesh"
"""Attributes of a Hugging Face model: its plans of styles by patterns of names, for tensor and for
expert parallelism, and its mesh. Only the model that was loaded has a mesh of its own; its parts
have plans, too. Without them the user passes `plan=` and `group=`.
"""

DISPATCH = "implementation"
"""Name in the forward of a module of experts under which transformers keeps how tokens reach the
experts of other ranks, an `EPImplementation`."""

EXPERT_FACTS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed")
"""Attributes of a module of experts of transformers: how its experts compute."""

_APPLY_GATE, _PLAIN_GATE = "_apply_gate", "_default_apply_gate"


def gate_of(experts: Any) -> tuple[Callable[[Any], Any], bool]:
    """Return how experts of transformers activate rows [R, 2 f], and whether that is the usual way.

    The usual way is the activation of the first half times the second half.
    """
    gate = getattr(experts, _APPLY_GATE)
    return gate, getattr(gate, "__name__", "") == _PLAIN_GATE


def exchanges_tokens(experts: Any) -> bool:
    """Return whether the kernel of experts of transformers exchanges tokens itself."""
    config = getattr(experts, "config", None)
    return "megamoe" in str(getattr(config, "_experts_implementation", ""))


_SLOTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k")


def slots_of(experts: Any) -> int:
    """Return how many experts a token has, by the configuration of experts; 0: unknown."""
    config = getattr(experts, "config", None)
    found = [getattr(config, key, None) for key in _SLOTS]
    return next((count for count in found if isinstance(count, int) and count > 0), 0)


DATA_DIMS = ("fsdp", "efsdp")
"""Names of dimensions of transformers' meshes over which FSDP splits parameters."""

HOOKED = "_is_hooked"
"""Attribute of a module to which transformers has applied an entry of a plan."""

ZERO_SHARD = "ds_id"
"""Attribute of a parameter that DeepSpeed's ZeRO-3 holds in shards."""

BASE_LAYER = "base_layer"
"""The child of a PEFT adapter that is the layer which the adapter replaced."""


def style_name(style: Any) -> str:
    """Return the name under which transformers registered a style, else the name of its class."""
    library = sys.modules.get("transformers.distributed.tensor_parallel")
    registered = getattr(library, "ALL_PARALLEL_STYLES", {})
    names = (name for name, each in registered.items() if each is style)
    return next(names, type(style).__name__)


class Framework(NamedTuple):
    """A framework whose layers ficco overlaps.

    Attributes:
        name: in messages.
        package: the name of its module.
        distribution: its name for pip.
        oldest: the oldest release that ficco supports, (major, minor) or longer.
        tested: the releases that the tests ran with; see docs/support.md.
        way: how its layers are overlapped.
        names: what a module of `ficco.integrations` needs of it, as "module:attribute.attribute".
    """

    name: str
    package: str
    distribution: str
    oldest: tuple[int, ...]
    tested: str
    way: str
    names: tuple[str, ...] = ()


_OVERLAP = "ficco.overlap(model)"
VLLM_LAYER = "vllm.model_executor.layers.linear:RowParallelLinear"
VLLM_UNQUANTIZED = "vllm.model_executor.layers.linear:UnquantizedLinearMethod"
VLLM_GEMM = "vllm.model_executor.layers.utils:default_unquantized_gemm"
VLLM_REPLACEMENTS = "vllm.model_executor.custom_op:op_registry_oot"
VLLM_GROUPS = "vllm.distributed.parallel_state:initialize_model_parallel"
VLLM_GROUP = "vllm.distributed.parallel_state:get_tp_group"
VLLM_ALL_REDUCE = "vllm.distributed:tensor_model_parallel_all_reduce"
VLLM_WORKER = "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device"
VLLM_PASS = "vllm.compilation.passes.inductor_pass:get_pass_context"
VLLM_INVARIANT = "vllm.envs:VLLM_BATCH_INVARIANT"
VLLM = Framework(
    "vLLM", "vllm", "vllm", (0, 33), "0.33.0", "FICCO_VLLM=1",
    (
        VLLM_LAYER, VLLM_LAYER + ".register_oot", VLLM_UNQUANTIZED, VLLM_GEMM, VLLM_REPLACEMENTS,
        VLLM_GROUPS, VLLM_GROUP, VLLM_ALL_REDUCE, VLLM_WORKER, VLLM_PASS, VLLM_INVARIANT,
    ),
)  # fmt: skip
SGLANG_LAYERS = "sglang.srt.layers.linear"
SGLANG_ROW = SGLANG_LAYERS + ":RowParallelLinear"
SGLANG_COLUMN = SGLANG_LAYERS + ":ColumnParallelLinear"
SGLANG_FORWARD = SGLANG_ROW + ".forward"
SGLANG_UNQUANTIZED = "sglang.srt.layers.quantization.unquant:UnquantizedLinearMethod"
SGLANG_SKIPPED = "sglang.srt.layers.moe.utils:should_skip_mlp_all_reduce"
SGLANG_SP = "sglang.srt.layers.layernorm_sp:layernorm_sp_enabled"
SGLANG_SP_TOKENS = "sglang.srt.layers.layernorm_sp:sp_num_tokens"
SGLANG_SP_GATHER = "sglang.srt.layers.layernorm_sp:column_parallel_g_matmul"
SGLANG_SP_SCATTER = "sglang.srt.layers.layernorm_sp:row_parallel_gbar_matmul"
SGLANG_GROUPS = "sglang.srt.distributed.parallel_state:initialize_model_parallel"
SGLANG_MEMORY = "sglang.srt.model_executor.model_runner:ModelRunner.alloc_memory_pool"
SGLANG_CONTEXT = "sglang.srt.runtime_context"
SGLANG_HOOKS = "sglang.srt.plugins.hook_registry:HookRegistry"
SGLANG_HOOK_TYPES = "sglang.srt.plugins.hook_registry:HookType"
SGLANG_PARALLEL, SGLANG_EXECUTION, SGLANG_SCHEDULE, SGLANG_LORA = (
    f"{SGLANG_CONTEXT}:get_{each}" for each in ("parallel", "exec", "schedule", "lora")
)
SGLANG = Framework(
    "SGLang", "sglang", "sglang", (0, 5, 23), "0.5.23", "FICCO_SGLANG=1",
    (
        SGLANG_ROW, SGLANG_COLUMN, SGLANG_FORWARD, SGLANG_UNQUANTIZED, SGLANG_SKIPPED, SGLANG_SP,
        SGLANG_SP_TOKENS, SGLANG_SP_GATHER, SGLANG_SP_SCATTER, SGLANG_GROUPS, SGLANG_MEMORY,
        SGLANG_HOOKS, SGLANG_HOOK_TYPES, SGLANG_PARALLEL, SGLANG_EXECUTION,
        SGLANG_SCHEDULE, SGLANG_LORA,
    ),
)  # fmt: skip
SGLANG_CUTLASS = "_sp_use_cutlass"
"""Attribute of SGLang's layers: whether a kernel of SGLang multiplies and sends."""
VLLM_GEMM_OF = "_gemm_impl"
"""Attribute of vLLM's UnquantizedLinearMethod: the function that multiplies."""


TORCHTITAN = Framework(
    "torchtitan", "torchtitan", "torchtitan", (0, 3), "0.3.0",
    "--override.imports ficco.integrations.torchtitan.attention, .feed_forward",
    (
        "torchtitan.config.override:override", "torchtitan.config.override:derive",
        "torchtitan.config:Configurable", "torchtitan.distributed.parallel_dims:SpmdLayout",
        "torchtitan.distributed.parallel_dims:ParallelDims.get_dense_tp_mesh",
        *(f"torchtitan.models.common.attention:{each}"
          for each in ("BaseAttention", "GQAttention", "QKVLinear", "FusedQKVLinear")),
        "torchtitan.models.common.decoder_sharding:dense_sequence_parallel_placement",
        *(f"torchtitan.models.common.dist_gemm:{each}" for each in
          ("AllGatherFusedFeedForward", "AllGatherFusedQKVLinear", "RowParallelLinear")),
        "torchtitan.models.common.feed_forward:FeedForward",
        "torchtitan.models.common.linear:Linear",
        *(f"torchtitan.protocols.sharding:{each}"
          for each in ("LocalMapConfig", "ShardingConfig", "spmd")),
    ),
)  # fmt: skip
MEGATRON = Framework(
    "Megatron-Core", "megatron.core", "megatron-core", (0, 16), "0.16.1",
    f"{_OVERLAP}; --spec ficco.integrations.megatron gpt_spec",
    (LAYER_SPEC, HAVE_ENGINE, SPEC_PROVIDER),
)  # fmt: skip
FRAMEWORKS = (
    Framework("Hugging Face", "transformers", "transformers", (5,), "5.24.0", _OVERLAP),
    TORCHTITAN, VLLM, SGLANG, MEGATRON,
    Framework("DeepSpeed", "deepspeed", "deepspeed", (0, 19), "0.19.8", _OVERLAP),
)  # fmt: skip


def objects_of(framework: Framework) -> tuple[Any, list[str]]:
    """Return a framework's objects by the last part of their names, and names that are absent."""
    found, missing = SimpleNamespace(), []
    for name in framework.names:
        try:
            setattr(found, re.split("[.:]", name)[-1], resolve(name))
        except (ImportError, AttributeError):
            missing.append(name)
    return found, missing


def release_of(package: str) -> str:
    """Return the release of an importable package, or an empty string."""
    return str(getattr(import_module(package), "__version__", ""))


def why_old(framework: Framework, release: str) -> str:
    """Return why a release of a framework is not supported, or an empty string."""
    numbers = tuple(map(int, re.findall(r"\d+", release.partition("+")[0])))
    if numbers >= framework.oldest:
        return ""
    oldest = ".".join(map(str, framework.oldest))
    return f"its release {release!r} is not known; {oldest} or newer is needed"


def why_unusable(framework: Framework) -> str:
    """Return why a plugin cannot change a framework, or an empty string."""
    try:
        release = release_of(framework.package)
    except ImportError:
        return f"{framework.package} is not installed"
    if why := why_old(framework, release):
        return why
    _, missing = objects_of(framework)
    return f"its release {release} has no {', '.join(missing)}" if missing else ""
