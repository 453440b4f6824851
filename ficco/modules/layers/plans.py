"""Layers of a plan by names: Hugging Face's own, or a mapping that the user gives.

    overlap(model, tp, plan={"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"})

Activations are whole on all ranks (or split along the last dimension between a column and a row
layer); weights are this rank's shards, plain or as DTensors. A column layer's forward needs no
communication: what overlaps is the sum of its input's gradient.
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

from ficco.errors import InputError, closest
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
_LOOKED_AT = 256  # elements of a weight
_NOTHING = ("sequence_parallel", "replicate", "all_reduce")  # styles without a GEMM of their own


class Plan:
    """Which modules are parallel, by patterns of names.

    Attributes:
        words: whose plan it is, for messages.
        styles: the name of a style, by pattern.
        given: whether the user gave it; a model's own plan may not have been applied.
        group: that the plan's model is split over, as far as the plan knows.
    """

    def __init__(self, words: str, styles: Mapping[str, str], given: bool, group: Any) -> None:
        self.words, self.styles, self.given, self.group = words, dict(styles), given, group

    def look(self, name: str, module: Module, group: Any) -> Found | Left | None:
        """Return what the plan makes of a module, if anything.

        Raises:
            InputError: the user's plan does not fit the module.
        """
        pattern = matching(name, self.styles)
        if pattern is None:
            return None
        style, words = self.styles[pattern], f"{self.styles[pattern]} of {self.words}"
        if isinstance(module, torch.nn.Embedding):
            return Left(name, words, "an embedding has no GEMM to hide behind", False)
        if style != "rowwise" and style not in _COLUMNS:
            if self.given:
                raise InputError(
                    f"plan[{pattern!r}]={style!r}{closest(style, ('rowwise', *_COLUMNS))}; ficco "
                    f"overlaps rowwise, {', '.join(_COLUMNS)}"
                )
            linear = isinstance(module, torch.nn.Linear) and style not in _NOTHING
            return Left(name, words, f"ficco knows no style {style}", True) if linear else None
        if not isinstance(module, torch.nn.Linear):
            if self.given:
                raise InputError(
                    f"plan[{pattern!r}] names {name}, a {type(module).__name__}; name linear layers"
                )
            return Left(name, words, f"{type(module).__name__} is no linear layer")
        return self._linear(name, module, style, words, group)

    def _linear(
        self, name: str, module: torch.nn.Linear, style: str, words: str, group: Any
    ) -> Found | Left | None:
        if left := unfit(name, module, words, torch.nn.Linear.forward):
            return left
        weight: Any = module.weight
        kind = "row" if style == "rowwise" else "column"
        dim = 0 if kind == "column" else 1
        if isinstance(weight, DTensor):
            if weight.device_mesh.ndim != 1 or not weight.placements[0].is_shard(dim):
                return Left(name, words, f"its weight is a DTensor split as {weight.placements}")
            group = weight.device_mesh.get_group()
        world, whole = dist.get_world_size(group), (module.out_features, module.in_features)[dim]
        what = ("out_features", "in_features")[dim]
        if isinstance(weight, DTensor):
            whole = weight.shape[dim]
        elif weight.shape[dim] == whole and world > 1 and not self.given:
            return None  # the plan was not applied: the weight is whole
        elif weight.shape[dim] not in (whole, -(-whole // world)):
            raise InputError(
                f"{name}: its weight is {list(weight.shape)} and {what}={whole} on {world} ranks; "
                f"a shard has {what}/{world} or, where {what} says so, as many"
            )
        else:
            whole = weight.shape[dim] * world
        if whole % world:
            return Left(name, words, f"{what}={whole} is not divisible by {world} ranks")
        if any(_of_style(hook) for hook in _hooks(module)):
            return Left(name, words, "its hooks turn inputs and outputs into DTensors")
        if not _replaceable(module):
            return Left(name, words, "its forward was replaced before")
        if kind == "row":
            told = self.given and not isinstance(weight, DTensor)
            return Found(name, module, words, kind, group, _row_at_first if told else _row)
        gathered = style in GATHERED
        forward = _column_gathered if gathered else _column
        notes = ("PyTorch gathers its output afterwards",) if gathered else ()
        reads = (self.words, style, weight.shape[1], weight.dtype, isinstance(weight, DTensor))
        return Found(name, module, words, kind, group, forward, reads, notes=notes)


def plan_of(model: Module, plan: Mapping[str, str] | None, group: Any) -> Plan | None:
    """Return the user's plan, or the model's own one, if there is any.

    Raises:
        InputError: the user's plan is no mapping, or a pattern of it names nothing.
    """
    if plan is not None:
        if not isinstance(plan, Mapping) or not all(isinstance(v, str) for v in plan.values()):
            raise InputError(
                f"plan: {plan!r:.80}; it maps patterns of names to styles, as in "
                "{'layers.*.q_proj': 'colwise'}"
            )
        check_patterns("plan", plan, [name for name, _ in model.named_modules()])
        return Plan("the given plan", plan, True, group)
    for prefix, module in model.named_modules():
        styles = module.__dict__.get(TP_PLAN)  # Hugging Face: of its children, too
        if isinstance(styles, dict) and styles:
            dot = f"{prefix}." if prefix else ""
            named = {dot + pattern: str(style) for pattern, style in styles.items()}
            mesh = module.__dict__.get(DEVICE_MESH)
            return Plan("the Hugging Face plan", named, False, _tensor_parallel(mesh, group))
    return None


def matching(name: str, patterns: Mapping[str, Any]) -> str | None:
    """Return the first pattern that a dotted name matches; * stands for anything."""
    if name in patterns:
        return name
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def check_patterns(argument: str, patterns: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse patterns that no name matches.

    Raises:
        InputError: one does not.
    """
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InputError(f"{argument}: {pattern!r:.80} found, a pattern of names is a text")
        if not any(fnmatchcase(name, pattern) for name in names):
            general = sorted({re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names})
            raise InputError(
                f"{argument}: no module is named {pattern!r}{closest(pattern, general)}; * stands "
                "for anything"
            )


def _tensor_parallel(mesh: Any, group: Any) -> Any:
    """Return the group of a mesh that is for tensor parallelism, where `group` is not given."""
    if group is not None or not isinstance(mesh, DeviceMesh):
        return group
    if mesh.ndim == 1:
        return mesh.get_group()
    return mesh["tp"].get_group() if "tp" in (mesh.mesh_dim_names or ()) else None


def _hooks(module: Module) -> list[Any]:
    return [*hooks_before(module).values(), *hooks_after(module).values()]


def _of_style(hook: Any) -> bool:
    """Whether a hook is one that `distribute_module` makes."""
    return "device_mesh" in closure_of(hook)


def _replaceable(module: Module) -> bool:
    """Whether a module's forward is its class's, or Hugging Face's around that."""
    forward = module.__dict__.get("forward")
    if forward is None:
        return True
    held = closure_of(forward)
    inner = getattr(held.get("original_forward"), "__func__", None)
    return inner is type(module).forward and "mesh" in held


# ---- what runs in the place of a layer's forward


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
    if not torch.compiler.is_compiling():  # a compiled call has seen nothing
        for other in modules[1:]:
            layer_of(other).seen = layer.seen
    return ys


def _column_gathered(module: Module, input: Any) -> Tensor:
    """Return the output whole on all ranks."""
    y = _column(module, input)
    weight: Any = module.weight
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
    else:
        mesh = DeviceMesh.from_group(layer_of(module).ranks.group, y.device.type)
    split = DTensor.from_local(y, mesh, [Shard(-1)], run_check=False)
    whole: Tensor = split.redistribute(placements=[Replicate()]).to_local()
    return whole


def _row_at_first(module: Module, input: Any) -> Any:
    """Run a layer of which the user says that it holds a shard; the first time, look whether so."""
    if not torch.compiler.is_compiling() and not layer_of(module).looked:
        weight: Any = module.weight
        if _can_look(weight):
            layer_of(module).looked = True
            with disable_modes():  # some rank's own
                _look_for_copies(module, weight)
    return _row(module, input)


def _can_look(weight: Any) -> bool:
    """Whether values may be asked for: no graph is made, and there are some."""
    if not modes_can_be_disabled or is_tracing():
        return False
    if type(weight) not in (Tensor, torch.nn.Parameter):
        return False
    if weight.is_meta or not weight.numel():
        return False
    return not (weight.is_cuda and torch.cuda.is_current_stream_capturing())


def _look_for_copies(module: Module, weight: Tensor) -> None:
    """Warn of a weight that is the same on some ranks: a shard that is none makes sums too large.

    A collective call, as the layer's forward is.
    """
    layer = layer_of(module)
    if layer.ranks.world == 1:
        return
    values = weight.detach().flatten()[:_LOOKED_AT].double().cpu()
    with torch.cuda.device(weight.device) if weight.is_cuda else nullcontext():
        group, mine = layer.ranks.group, values.tolist()
        found = groups.gathered(group, weight.device, mine, opening=True)
    if bool((values == values[0]).all()):
        return
    alike = next((places for each in found if len(places := _places(each, found)) > 1), [])
    if not alike:
        return
    where = "all ranks" if len(alike) == len(found) else f"ranks {alike}"
    note = f"its weight begins alike on {where}: if it is the same there, results are too large"
    layer.notes.append(note)
    groups.log.warning(
        "%s (%s): %s; plan= is for local shards, group= is the group that they are split over",
        layer.name, layer.style, note,
    )  # fmt: skip


def _places(value: Any, among: Sequence[Any]) -> list[int]:
    return [place for place, each in enumerate(among) if each == value]


def _row(module: Module, input: Any) -> Tensor:
    if isinstance(input, DTensor):
        input = input.redistribute(placements=[Shard(-1)]).to_local()
    return layer_of(module).reduce(input, local_of(module.weight), local_of(module.bias))
