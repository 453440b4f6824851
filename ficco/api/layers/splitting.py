"""What of a model is split over the ranks of a group: parameters, and modules with wrappers.

A DTensor's placements, or a mark by Megatron-Core, show that a parameter is split. transformers
wraps the forward of each module for which its plan has a style.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ficco.api.layers.finding import closure_of
from ficco.core.private.frameworks import DATA_DIMS, SPLIT
from ficco.core.private.torch_layers import hooks_after, hooks_before, parameters_of

__all__ = ["Splits", "has_style_hook", "wrapper_of"]

Module = torch.nn.Module


def wrapper_of(module: Module) -> dict[str, Any]:
    """Return the closure of transformers' wrapper of a module's forward, or an empty dictionary."""
    closure = closure_of(module.__dict__.get("forward"))
    return closure if closure.keys() & {"original_forward", "ep_mesh"} else {}


def has_style_hook(module: Module) -> bool:
    """Return whether `distribute_module` made a hook of a module."""
    return any("device_mesh" in closure for closure in _hook_closures(module))


class Splits:
    """The groups that a model is split over, and the parameters that are split over them.

    FSDP splits parameters, too, over other groups: it gathers them before each forward.

    Args:
        named: the modules of the model, by name.
        groups: ProcessGroups that are known to the caller.
    """

    def __init__(self, named: Mapping[str, Module], groups: Iterable[Any]) -> None:
        meshes = [mesh for module in named.values() for mesh in _meshes_of(module)]
        own = [mesh.get_group() for mesh in meshes if mesh.ndim == 1 and mesh.get_coordinate()]
        self._groups = {_members(group) for group in (*own, *groups) if group is not None}
        library = sys.modules.get("torch.distributed.fsdp")
        kind = getattr(library, "FSDPModule", ())
        roots = [module for module in named.values() if isinstance(module, kind)]
        self._sharded = {module for root in roots for module in root.modules()}

    def parameters(self, module: Module) -> list[str]:
        """Return the names of a module's own parameters that are split."""
        return [
            name for name, each in parameters_of(module).items() if self._is_split(each, module)
        ]

    def _is_split(self, parameter: Any, module: Module) -> bool:
        if not isinstance(parameter, DTensor):
            return bool(getattr(parameter, SPLIT, False))
        mesh = parameter.device_mesh
        split = [i for i, each in enumerate(parameter.placements) if not each.is_replicate()]
        if module in self._sharded and (names := mesh.mesh_dim_names):
            split = [i for i in split if names[i] not in DATA_DIMS]
        if not self._groups:
            return bool(split) and module not in self._sharded
        return any(_members(mesh.get_group(i)) in self._groups for i in split)


def _members(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _hook_closures(module: Module) -> list[dict[str, Any]]:
    hooks = [*hooks_before(module).values(), *hooks_after(module).values()]
    return [closure_of(hook) for hook in hooks]


def _meshes_of(module: Module) -> list[DeviceMesh]:
    """Return the meshes in a module's wrapper and in hooks of styles."""
    found = [wrapper_of(module).get(name) for name in ("mesh", "ep_mesh")]
    found += [closure.get("device_mesh") for closure in _hook_closures(module)]
    return [mesh for mesh in found if isinstance(mesh, DeviceMesh)]
