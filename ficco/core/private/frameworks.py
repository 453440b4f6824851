"""Private attributes of Megatron-Core's, Hugging Face's, PEFT's and DeepSpeed's objects, by name.

If an attribute is absent, `getattr` and `get` return None. Names of torchtitan, which documents
none, are here, too. Its integration needs all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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


_TORCHTITAN = """
    torchtitan.config.override:override torchtitan.config.override:derive
    torchtitan.config:Configurable
    torchtitan.distributed.parallel_dims:SpmdLayout
    torchtitan.distributed.parallel_dims:ParallelDims.get_dense_tp_mesh
    torchtitan.models.common.attention:BaseAttention
    torchtitan.models.common.attention:GQAttention
    torchtitan.models.common.attention:QKVLinear
    torchtitan.models.common.attention:FusedQKVLinear
    torchtitan.models.common.decoder_sharding:dense_sequence_parallel_placement
    torchtitan.models.common.dist_gemm:AllGatherFusedFeedForward
    torchtitan.models.common.dist_gemm:AllGatherFusedQKVLinear
    torchtitan.models.common.dist_gemm:RowParallelLinear
    torchtitan.models.common.feed_forward:FeedForward
    torchtitan.models.common.linear:Linear
    torchtitan.protocols.sharding:LocalMapConfig torchtitan.protocols.sharding:ShardingConfig
    torchtitan.protocols.sharding:spmd
"""


def torchtitan_names() -> tuple[Any, list[str]]:
    """Return torchtitan's objects by the last part of their name, and the names that are absent."""
    found, missing = SimpleNamespace(), []
    for name in _TORCHTITAN.split():
        try:
            setattr(found, name.rpartition(":")[2], resolve(name))
        except (ImportError, AttributeError):
            missing.append(name)
    return found, missing
