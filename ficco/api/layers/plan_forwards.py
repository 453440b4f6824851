"""Forwards of layers that a plan names: inputs are whole on every rank, or split by columns.

Weights are this rank's shards, plain tensors or DTensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ficco.api import groups
from ficco.api.layers.finding import local_of
from ficco.api.layers.layer import layer_of
from ficco.core.logs import log
from ficco.core.private.torch_core import is_tracing
from ficco.core.private.torch_layers import disable_modes, modes_can_be_disabled

__all__ = ["checked_row", "column", "column_gathered", "row"]

Module = torch.nn.Module
Tensor = torch.Tensor

_COMPARED = 256  # elements of a weight that are compared between ranks


def column(module: Module, input: Any) -> Any:
    """Run a column layer, together with those that share its call."""
    layer = layer_of(module)
    if layer.sharing is None or not torch.is_grad_enabled():
        return _columns([module], input)[0]
    return layer.sharing.result(module, layer.place, input, _columns)


def _columns(modules: Sequence[Module], x: Any) -> list[Tensor]:
    layer = layer_of(modules[0])
    if isinstance(x, DTensor):
        x = x.redistribute(placements=[Replicate()]).to_local()
    weights = [local_of(module.weight) for module in modules]
    biases = [local_of(module.bias) for module in modules]
    ys = layer.columns(x, weights, biases)
    layer.note_shared(modules)
    return ys


def column_gathered(module: Module, input: Any) -> Tensor:
    """Run a column layer; return the output whole on all ranks."""
    y = column(module, input)
    split = DTensor.from_local(y, _mesh_of(module, y), [Shard(-1)], run_check=False)
    whole: Tensor = split.redistribute(placements=[Replicate()]).to_local()
    return whole


def _mesh_of(module: Module, tensor: Tensor) -> DeviceMesh:
    weight: Any = module.weight
    if isinstance(weight, DTensor):
        return weight.device_mesh
    return DeviceMesh.from_group(layer_of(module).ranks.group, tensor.device.type)


def checked_row(module: Module, input: Any) -> Any:
    """Run a row layer; the first time, check that its weight is a shard, as the plan says."""
    if not torch.compiler.is_compiling() and not layer_of(module).checked_for_copies:
        weight: Any = module.weight
        if _can_read(weight):
            layer_of(module).checked_for_copies = True
            with disable_modes():  # modes may differ between ranks
                _warn_of_copies(module, weight)
    return row(module, input)


def _can_read(weight: Any) -> bool:
    """Return whether a weight's values can be read: it has values, and no graph is being made."""
    if not modes_can_be_disabled or is_tracing():
        return False
    if type(weight) not in (Tensor, torch.nn.Parameter):
        return False
    if weight.is_meta or not weight.numel():
        return False
    return not (weight.is_cuda and torch.cuda.is_current_stream_capturing())


def _warn_of_copies(module: Module, weight: Tensor) -> None:
    """Warn if a weight is equal on some ranks: a whole weight instead of a shard spoils the sum.

    A collective call, like the layer's forward.
    """
    layer = layer_of(module)
    if layer.ranks.world == 1:
        return
    values = weight.detach().flatten()[:_COMPARED].double().cpu()
    with torch.cuda.device(weight.device) if weight.is_cuda else nullcontext():
        own, group = values.tolist(), layer.ranks.group
        by_rank = groups.gathered(group, weight.device, "compare weights", own, opening=True)
    if bool((values == values[0]).all()):
        return
    equal = next((ranks for each in by_rank if len(ranks := _indices(each, by_rank)) > 1), [])
    if not equal:
        return
    where = "all ranks" if len(equal) == len(by_rank) else f"ranks {equal}"
    note = f"its weight begins with equal values on {where}: if all are equal, sums are too large"
    layer.notes.append(note)
    log.warning(
        "%s (%s): %s; plan= is for local shards, group= is the group that they are split over",
        layer.name, layer.style, note,
    )  # fmt: skip


def _indices(value: Any, among: Sequence[Any]) -> list[int]:
    return [index for index, other in enumerate(among) if other == value]


def row(module: Module, input: Any) -> Tensor:
    """Run a row layer; cut this rank's part from an input that is whole."""
    layer = layer_of(module)
    if layer.cuts_input and not isinstance(input, DTensor):
        mesh = _mesh_of(module, input)
        input = DTensor.from_local(input, mesh, [Replicate()], run_check=False)
    if isinstance(input, DTensor):
        input = input.redistribute(placements=[Shard(-1)]).to_local()
    return layer.reduce(input, local_of(module.weight), local_of(module.bias))
