"""Private attributes of Megatron-Core's and Hugging Face's objects, read by name.

If an attribute is absent, `getattr` and `get` return None.
"""

from __future__ import annotations

__all__ = ["DEVICE_MESH", "OFFLOADING", "TP_PLAN"]

OFFLOADING = "_cpu_offloading_context"
"""Attribute of a Megatron-Core config, set while activations are offloaded. Layers are then left
unchanged.
"""

TP_PLAN, DEVICE_MESH = "_tp_plan", "_device_mesh"
"""Attributes of a Hugging Face model: its plan of styles by patterns of names, and its mesh.
Without them the user passes `plan=` and `group=`."""
