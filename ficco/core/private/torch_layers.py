"""Private names of PyTorch's modules, DTensors and tensor-parallel styles.

PyTorch has no public list of a module's hooks, and no public way to find the style that made a
layer parallel. If such a name is absent, the layers that need it are left unchanged, and
`ficco.explain` says why.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ficco.core.private.finding import ABSENT, find, find_in

Module = torch.nn.Module
Tensor = torch.Tensor

# ---- the contents of a module


_MODULE = Module()

BEFORE, AFTER = "_forward_pre_hooks", "_forward_hooks"
ALWAYS = "_forward_hooks_always_called"
"""Names of the dictionaries of a module's hooks: before its forward, after it, and the keys of the
latter that also run after an error in the forward.

`register_forward_hook` adds a hook; no public function lists or replaces one. Without these names
no layer with a DTensor weight is overlapped, because a hidden hook could communicate too, and no
layers share a gather.
"""
_EFFECT = "layers with DTensor weights are left unchanged, and layers do not share a gather"
_present = [find_in(_MODULE, key, _EFFECT) for key in (BEFORE, AFTER, ALWAYS)]
HOOKS_ARE_KNOWN = all(_present)


def hooks_before(module: Module) -> dict[Any, Any]:
    """Return the module's own dictionary of hooks before its forward, by key."""
    return getattr(module, BEFORE) if HOOKS_ARE_KNOWN else {}


def hooks_after(module: Module) -> dict[Any, Any]:
    """Return the module's own dictionary of hooks after its forward, by key."""
    return getattr(module, AFTER) if HOOKS_ARE_KNOWN else {}


_PARAMETERS, _BUFFERS = "_parameters", "_buffers"
_PUBLIC = "named_parameters and named_buffers are called, which takes longer"
_has_parameters = find_in(_MODULE, _PARAMETERS, _PUBLIC)
_has_buffers = find_in(_MODULE, _BUFFERS, _PUBLIC)


def parameters_of(module: Module) -> dict[str, Any]:
    """Return a module's own parameters by name. `named_parameters` takes longer."""
    if _has_parameters:
        return getattr(module, _PARAMETERS)  # type: ignore[no-any-return]
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def buffers_of(module: Module) -> dict[str, Any]:
    """Return a module's own buffers by name."""
    if _has_buffers:
        return getattr(module, _BUFFERS)  # type: ignore[no-any-return]
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


# ---- the context of a layer's call


def _cannot_disable() -> Any:
    raise RuntimeError("modes cannot be disabled: check modes_can_be_disabled first")


disable_modes = find(
    "torch.utils._python_dispatch:_disable_current_modes",
    _cannot_disable,
    "weights that a plan calls shards are not compared between ranks",
)
"""A context manager that hides operators from all modes. There is no public one: if it is absent,
`modes_can_be_disabled` is False and callers skip the work that needs it.
"""
modes_can_be_disabled = disable_modes is not _cannot_disable


def _no_graph_task() -> int:
    return -1


current_graph_task = find(
    "torch._C:_current_graph_task_id", _no_graph_task, "layers of one parent do not share a gather"
)
"""Returns the number of the backward pass that runs in this thread, or -1.

There is no public function. If it is absent, `graph_tasks_are_known` is False.
"""
graph_tasks_are_known = current_graph_task is not _no_graph_task


# ---- DTensors

LOCAL = "_local_tensor"
"""The attribute of a DTensor that holds this rank's shard."""


def _local_attribute(tensor: Any) -> Any:
    return getattr(tensor, LOCAL, tensor)


def _local_by_to_local(tensor: Any) -> Any:
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


find(f"torch.distributed.tensor:DTensor.{LOCAL}", None, "DTensor.to_local")
local_part = (
    _local_by_to_local
    if f"torch.distributed.tensor:DTensor.{LOCAL}" in ABSENT
    else _local_attribute
)
"""Returns a DTensor's shard on this rank, outside of autograd; any other tensor itself.

The public `to_local` records a view if gradients are recorded.
"""


# ---- styles of tensor parallelism


def _of_style(name: str) -> Any:
    return find(
        f"torch.distributed.tensor.parallel:{name}", None, "layers of this style are left unchanged"
    )


column_input = _of_style("ColwiseParallel._prepare_input_fn")
column_output = _of_style("ColwiseParallel._prepare_output_fn")
row_input = _of_style("RowwiseParallel._prepare_input_fn")
row_output = _of_style("RowwiseParallel._prepare_output_fn")
sequence_input = _of_style("SequenceParallel._prepare_input_fn")
"""The functions by which styles prepare inputs and outputs of a layer; None: absent.

A hook that contains one identifies the style. There is no public way.
"""

prepare_input: Any = _of_style("PrepareModuleInput._prepare_input_fn")
prepare_named_input: Any = _of_style("PrepareModuleInput._prepare_input_kwarg_fn")
"""The functions by which PrepareModuleInput prepares a module's inputs.

ficco calls them with the style, the inputs and the mesh. None: absent; a parent keeps its gather.
"""
