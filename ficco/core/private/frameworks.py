"""Private attributes of Megatron-Core's, Hugging Face's, PEFT's and DeepSpeed's objects, by name.

If an attribute is absent, `getattr` and `get` return None.
"""

from __future__ import annotations

import sys
from typing import Any

OFFLOADING = "_cpu_offloading_context"
"""Attribute of a Megatron-Core config, set while activations are offloaded. Layers are then left
unchanged.
"""

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
