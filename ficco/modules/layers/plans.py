"""Layers that a plan names: Hugging Face's own plan, or the user's mapping.

    overlap(model, tp, plan={"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"})

Activations are whole on all ranks (or split along the last dimension between a column and a row
layer); weights are this rank's shards, plain tensors or DTensors. A column layer's forward needs no
communication; its backward overlaps the sum of its input's gradient.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ficco.errors import InputError, closest, shown
from ficco.modules import groups
from ficco.modules.layers.finding import Found, closure_of, local_of, unfit
from ficco.modules.layers.layer import Left, layer_of
from ficco.private.frameworks import DEVICE_MESH, TP_PLAN
from ficco.private.torch_core import is_tracing
from ficco.private.torch_layers import (
    disable_modes,
    hooks_after,
    hooks_before,
    modes_can_be_disabled,
)

__all__ = ["GATHERED", "Plan", "check_patterns", "matching", "plan_of"]

Module = torch.nn.Module
Tensor = torch.Tensor

GATHERED = ("colwise_gather_output", "colwise_rep")  # column layers whose output is gathered
_COLUMNS = ("colwise", *GATHERED)
_COMPARED = 256  # elements of a weight that are compared between ranks
_WITHOUT_GEMM = ("sequence_parallel", "replicate", "all_reduce")  # styles without a GEMM


class Plan:
    """The styles of parallel modules, by patterns of names.

    Attributes:
        words: the origin of the plan, for messages.
        styles: the name of a style, by pattern.
        given: whether the user gave it; a model's own plan may not have been applied.
        group: the group that the model is split over, if the plan has it.
    """

    def __init__(self, words: str, styles: Mapping[str, str], given: bool, group: Any) -> None:
        self.words, self.styles, self.given, self.group = words, dict(styles), given, group

    def look(self, name: str, module: Module, group: Any) -> Found | Left | None:
        """Return the plan's result for a module, or None.

        Raises:
            InputError: the user's plan does not fit the module.
        """
        pattern = matching(name, self.styles)
        if pattern is None:
            return None
        style, words = self.styles[pattern], f"{self.styles[pattern]} of {self.words}"
        known = ("rowwise", *_COLUMNS)
        if isinstance(module, torch.nn.Embedding) and (style in known or not self.given):
            return Left(name, words, "an embedding has no GEMM to hide behind", False)
        if style not in known:
            if self.given:
                raise InputError(
                    f"plan[{pattern!r}]={style!r}{closest(style, known)}; ficco overlaps "
                    f"{', '.join(known)}"
                )
            linear = isinstance(module, torch.nn.Linear) and style not in _WITHOUT_GEMM
            return Left(name, words, f"ficco has no style {style}", True) if linear else None
        if not isinstance(module, torch.nn.Linear):
            if self.given:
                raise InputError(
                    f"plan[{pattern!r}] names {name or 'the model itself'}, a "
                    f"{type(module).__name__}; name linear layers"
                )
            return Left(name, words, f"{type(module).__name__} is not a linear layer")
        return self._linear(name, module, style, words, group)

    def must_overlap(self, name: str, module: Module) -> bool:
        """Return whether only ficco would exchange the data of a module.

        True for local shards that the user's plan names. DTensors, and hooks that make them,
        communicate without ficco.
        """
        return (
            self.given
            and isinstance(module, torch.nn.Linear)
            and not isinstance(module.weight, DTensor)
            and matching(name, self.styles) is not None
            and not any(_of_style(hook) for hook in _hooks(module))
        )

    def _linear(
        self, name: str, module: torch.nn.Linear, style: str, words: str, group: Any
    ) -> Found | Left | None:
        if left := unfit(name, module, words, torch.nn.Linear.forward):
            return left
        weight: Any = module.weight
        kind = "row" if style == "rowwise" else "column"
        dim = 0 if kind == "column" else 1
        if isinstance(weight, DTensor):
            mesh, placement = _parallel_part(weight, module)
            if mesh is None or not placement.is_shard(dim):
                return Left(name, words, f"its weight is a DTensor split as {weight.placements}")
            group = mesh.get_group()
        world, whole = dist.get_world_size(group), (module.out_features, module.in_features)[dim]
        what = ("out_features", "in_features")[dim]
        if isinstance(weight, DTensor):
            whole = weight.shape[dim]
        elif weight.shape[dim] == whole and world > 1 and not self.given:
            return None  # the plan was not applied: the weight is whole
        elif weight.shape[dim] not in (whole, -(-whole // world)):
            raise InputError(
                f"{name}: its weight is {list(weight.shape)} and {what}={whole} on {world} ranks; "
                f"a shard needs {what}/{world}, or {what} itself if that is the shard's size"
            )
        else:
            whole = weight.shape[dim] * world
        if whole % world:
            return Left(name, words, f"{what}={whole} is not divisible by {world} ranks")
        if any(_of_style(hook) for hook in _hooks(module)):
            return Left(name, words, "its hooks turn inputs and outputs into DTensors")
        if not _replaceable(module):
            return Left(name, words, "its forward was already replaced")
        if kind == "row":
            unchecked = self.given and not isinstance(weight, DTensor)
            return Found(name, module, words, kind, group, _checked_row if unchecked else _row)
        gathered = style in GATHERED
        forward = _column_gathered if gathered else _column
        notes = ("PyTorch gathers its output afterwards",) if gathered else ()
        reads = (self.words, style, weight.shape[1], weight.dtype, isinstance(weight, DTensor))
        return Found(name, module, words, kind, group, forward, reads, notes=notes)


def plan_of(model: Module, plan: Mapping[str, str] | None, group: Any) -> Plan | None:
    """Return the user's plan, else the model's own plan, else None.

    Raises:
        InputError: the user's plan is not a mapping, or one of its patterns matches nothing.
    """
    if plan is not None:
        if not isinstance(plan, Mapping) or not all(isinstance(v, str) for v in plan.values()):
            raise InputError(
                f"plan: {shown(plan)} found; it must map patterns of names to styles, as in "
                "{'layers.*.q_proj': 'colwise'}"
            )
        _check_aliases(model, plan)
        check_patterns("plan", plan, [name for name, _ in model.named_modules()])
        return Plan("the given plan", plan, True, group)
    for prefix, module in model.named_modules():
        styles = module.__dict__.get(TP_PLAN)  # Hugging Face: includes the module's children
        if isinstance(styles, dict) and styles:
            dot = f"{prefix}." if prefix else ""
            named = {dot + pattern: str(style) for pattern, style in styles.items()}
            mesh = module.__dict__.get(DEVICE_MESH)
            return Plan("the Hugging Face plan", named, False, _tensor_parallel(mesh, group))
    return None


def _check_aliases(model: Module, plan: Mapping[str, str]) -> None:
    """Refuse the second name of a module, which has its first name everywhere else.

    Raises:
        InputError: a name in the plan is the second one of its module.
    """
    first = {module: name for name, module in model.named_modules()}
    for name, module in model.named_modules(remove_duplicate=False):
        if name in plan and name != first[module]:
            raise InputError(
                f"plan[{name!r}]: the first name of this module is {first[module]!r}; use that"
            )


def matching(name: str, patterns: Mapping[str, Any]) -> str | None:
    """Return the first pattern that a dotted name matches; * stands for anything."""
    if name in patterns:
        return name
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def check_patterns(argument: str, patterns: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse patterns that no name matches.

    Raises:
        InputError: a pattern matches no name.
    """
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InputError(f"{argument}: {shown(pattern)} found, a pattern must be a string")
        if not any(fnmatchcase(name, pattern) for name in names):
            general = sorted({re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names})
            raise InputError(
                f"{argument}: no module is named {pattern!r}{closest(pattern, general)}; * stands "
                "for anything"
            )


def _tensor_parallel(mesh: Any, group: Any) -> Any:
    """Return the tensor-parallel group of a mesh, unless `group` is given."""
    if group is not None or not isinstance(mesh, DeviceMesh):
        return group
    if mesh.ndim == 1:
        return mesh.get_group()
    return mesh["tp"].get_group() if "tp" in (mesh.mesh_dim_names or ()) else None


def _parallel_part(weight: DTensor, module: Module) -> tuple[DeviceMesh | None, Any]:
    """Return the tensor-parallel mesh of a weight, and how the weight is split over it.

    Between calls, FSDP's weights are split over a mesh of more dimensions. Then the mesh is that of
    Hugging Face's wrapper of the forward; None: there is none.
    """
    mesh, placements = weight.device_mesh, tuple(weight.placements)
    if mesh.ndim == 1:
        return mesh, placements[0]
    own = closure_of(module.__dict__.get("forward")).get("mesh")
    names: Sequence[str] = mesh.mesh_dim_names or ()
    own_names: Sequence[str] = getattr(own, "mesh_dim_names", None) or ()
    if len(own_names) != 1 or own_names[0] not in names:
        return None, None
    return own, placements[names.index(own_names[0])]


def _hooks(module: Module) -> list[Any]:
    return [*hooks_before(module).values(), *hooks_after(module).values()]


def _of_style(hook: Any) -> bool:
    """Return whether `distribute_module` made a hook."""
    return "device_mesh" in closure_of(hook)


def _replaceable(module: Module) -> bool:
    """Return whether a module's forward is its class's, or Hugging Face's wrapper of it."""
    forward = module.__dict__.get("forward")
    if forward is None:
        return True
    closure = closure_of(forward)
    inner = getattr(closure.get("original_forward"), "__func__", None)
    return inner is type(module).forward and "mesh" in closure


# ---- replacements of a layer's forward


def _column(module: Module, input: Any) -> Any:
    layer = layer_of(module)
    if layer.sharing is None or not torch.is_grad_enabled():
        return _columns([module], input)[0]
    return layer.sharing.result(layer.place, input, _columns)


def _columns(modules: Sequence[Module], x: Any) -> list[Tensor]:
    layer = layer_of(modules[0])
    if isinstance(x, DTensor):
        x = x.redistribute(placements=[Replicate()]).to_local()
    weights = [local_of(module.weight) for module in modules]
    biases = [local_of(module.bias) for module in modules]
    ys = layer.columns(x, weights, biases)
    if not torch.compiler.is_compiling():  # compiled calls are not recorded
        for other in modules[1:]:
            layer_of(other).seen = layer.seen
    return ys


def _column_gathered(module: Module, input: Any) -> Tensor:
    """Run a column layer; return the output whole on all ranks."""
    y = _column(module, input)
    weight: Any = module.weight
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
    else:
        mesh = DeviceMesh.from_group(layer_of(module).ranks.group, y.device.type)
    split = DTensor.from_local(y, mesh, [Shard(-1)], run_check=False)
    whole: Tensor = split.redistribute(placements=[Replicate()]).to_local()
    return whole


def _checked_row(module: Module, input: Any) -> Any:
    """Run a row layer; the first time, check that its weight is a shard, as the plan says."""
    if not torch.compiler.is_compiling() and not layer_of(module).checked_for_copies:
        weight: Any = module.weight
        if _can_read(weight):
            layer_of(module).checked_for_copies = True
            with disable_modes():  # modes may differ between ranks
                _warn_of_copies(module, weight)
    return _row(module, input)


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
        by_rank = groups.gathered(group, weight.device, own, opening=True)
    if bool((values == values[0]).all()):
        return
    equal = next((ranks for each in by_rank if len(ranks := _indices(each, by_rank)) > 1), [])
    if not equal:
        return
    where = "all ranks" if len(equal) == len(by_rank) else f"ranks {equal}"
    note = f"its weight begins with equal values on {where}: if all are equal, sums are too large"
    layer.notes.append(note)
    groups.log.warning(
        "%s (%s): %s; plan= is for local shards, group= is the group that they are split over",
        layer.name, layer.style, note,
    )  # fmt: skip


def _indices(value: Any, among: Sequence[Any]) -> list[int]:
    return [index for index, other in enumerate(among) if other == value]


def _row(module: Module, input: Any) -> Tensor:
    if isinstance(input, DTensor):
        input = input.redistribute(placements=[Shard(-1)]).to_local()
    return layer_of(module).reduce(input, local_of(module.weight), local_of(module.bias))
