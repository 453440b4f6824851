"""Private attributes of Megatron-Core's and Hugging Face's objects, read by name where they exist.

Their fallback is that they are absent: `getattr` and `get` then return None.
"""

from __future__ import annotations

__all__ = ["DEVICE_MESH", "OFFLOADING", "TP_PLAN"]

OFFLOADING = "_cpu_offloading_context"
"""Of a config of Megatron-Core: set while activations are offloaded. Layers then stay as they are.
"""

TP_PLAN, DEVICE_MESH = "_tp_plan", "_device_mesh"
"""Of a model of Hugging Face: its plan of styles by patterns of names, and the mesh of the model.
Without them the user gives `plan=` and `group=`."""
