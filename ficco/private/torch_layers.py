"""Private names of PyTorch's modules, DTensors and tensor-parallel styles.

PyTorch has no public list of a module's hooks, and no public way to tell which style made a layer
parallel. Where such a name is absent, the layers that need it stay as PyTorch made them, and
`ficco.explain` says why.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ficco.private.finding import ABSENT, find, find_in

__all__ = [
    "AFTER",
    "ALWAYS",
    "BEFORE",
    "HOOKS_ARE_KNOWN",
    "LOCAL",
    "buffers_of",
    "column_input",
    "column_output",
    "current_graph_task",
    "disable_modes",
    "graph_tasks_are_known",
    "hooks_after",
    "hooks_before",
    "local_part",
    "modes_can_be_disabled",
    "parameters_of",
    "prepare_input",
    "prepare_named_input",
    "row_input",
    "row_output",
    "sequence_input",
    "version_of",
    "versions_are_known",
]

Module = torch.nn.Module
Tensor = torch.Tensor

# ---- what a module holds


_MODULE = Module()

BEFORE, AFTER = "_forward_pre_hooks", "_forward_hooks"
ALWAYS = "_forward_hooks_always_called"
"""Names of the dictionaries of a module's hooks: before its forward, after it, and which of these
are called where the forward raised.

`register_forward_hook` adds a hook; nothing public lists or replaces one. Without these names no
layer with a DTensor weight is overlapped, because a hook that is not seen could communicate, too,
and no layers share a gather.
"""
_STAY = "layers with DTensor weights stay as they are, and layers do not share a gather"
_shown = [find_in(_MODULE, each, _STAY) for each in (BEFORE, AFTER, ALWAYS)]
HOOKS_ARE_KNOWN = all(_shown)


def hooks_before(module: Module) -> dict[Any, Any]:
    """Return a module's hooks before its forward, by key: the module's own dictionary."""
    return getattr(module, BEFORE) if HOOKS_ARE_KNOWN else {}


def hooks_after(module: Module) -> dict[Any, Any]:
    """Return a module's hooks after its forward, by key: the module's own dictionary."""
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


# ---- what a layer's call runs under


def _cannot_disable() -> Any:
    raise RuntimeError("modes cannot be disabled: ask modes_can_be_disabled first")


disable_modes = find(
    "torch.utils._python_dispatch:_disable_current_modes",
    _cannot_disable,
    "weights that a plan calls shards are not compared between ranks",
)
"""A context manager in which no mode sees an operator. No public one exists, so that without it
`modes_can_be_disabled` is False and the caller leaves out what needs it.
"""
modes_can_be_disabled = disable_modes is not _cannot_disable


def _no_graph_task() -> int:
    return -1


current_graph_task = find(
    "torch._C:_current_graph_task_id", _no_graph_task, "layers of one parent do not share a gather"
)
"""A number of the backward pass that runs in this thread, or -1.

No public function tells. Without it `graph_tasks_are_known` is False.
"""
graph_tasks_are_known = current_graph_task is not _no_graph_task


def _never_written(tensor: Tensor) -> int:
    return 0


_VERSION = "_version"
versions_are_known = (
    find(f"torch:Tensor.{_VERSION}", None, "layers of one parent do not share a gather") is not None
)
version_of: Callable[[Tensor], int]
version_of = operator.attrgetter(_VERSION) if versions_are_known else _never_written
"""How often a tensor was written. No public attribute tells.

Without it `versions_are_known` is False.
"""


# ---- DTensors

LOCAL = "_local_tensor"
"""The attribute of a DTensor that holds this rank's part."""


def _part_held(tensor: Any) -> Any:
    return getattr(tensor, LOCAL, tensor)


def _part_asked(tensor: Any) -> Any:
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


find(f"torch.distributed.tensor:DTensor.{LOCAL}", None, "DTensor.to_local")
local_part = _part_asked if f"torch.distributed.tensor:DTensor.{LOCAL}" in ABSENT else _part_held
"""A DTensor's part on this rank, outside of autograd; any other tensor itself.

The public `to_local` records a view where gradients are recorded.
"""


# ---- styles of tensor parallelism


def _of_style(name: str) -> Any:
    return find(
        f"torch.distributed.tensor.parallel:{name}", None, "layers of this style stay as they are"
    )


column_input = _of_style("ColwiseParallel._prepare_input_fn")
column_output = _of_style("ColwiseParallel._prepare_output_fn")
row_input = _of_style("RowwiseParallel._prepare_input_fn")
row_output = _of_style("RowwiseParallel._prepare_output_fn")
sequence_input = _of_style("SequenceParallel._prepare_input_fn")
"""The functions by which styles prepare inputs and outputs of a layer; None: it is absent.

A hook that holds one tells the style. Nothing public does.
"""

prepare_input: Any = _of_style("PrepareModuleInput._prepare_input_fn")
prepare_named_input: Any = _of_style("PrepareModuleInput._prepare_input_kwarg_fn")
"""The functions by which PrepareModuleInput prepares what a module is called with.

Called here with the style, the inputs and the mesh. None: it is absent, and a parent keeps its
gather.
"""
