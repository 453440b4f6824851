"""Layers that a plan names: plans of Hugging Face's models, or the user's mapping.

    overlap(model, tp, plan={"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"})

Activations are whole on all ranks (or split along the last dimension between a column and a row
layer); weights are this rank's shards, plain tensors or DTensors. A column layer's forward needs no
communication; its backward overlaps the sum of its input's gradient.

A Hugging Face plan also names experts, their parameters, and modules whose outputs are summed.
What is split or summed and cannot be overlapped is returned as Left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ficco.api.layers import plan_forwards
from ficco.api.layers.finding import Found, class_name, closure_of, unfit
from ficco.api.layers.layer import Left
from ficco.api.layers.splitting import Splits, has_style_hook, wrapper_of
from ficco.core.errors import InputError, closest, shown
from ficco.core.private.frameworks import (
    BASE_LAYER,
    DEVICE_MESH,
    EP_PLAN,
    HOOKED,
    TP_PLAN,
    style_name,
)
from ficco.core.private.torch_layers import parameters_of

Module = torch.nn.Module
Linear = torch.nn.Linear

GATHERED = ("colwise_gather_output", "colwise_rep")  # column layers whose output is gathered
_CUT = ("rowwise_split_input", "rowwise_rep")  # row layers whose input is whole
_STYLES = ("rowwise", *_CUT, "colwise", *GATHERED)
_HUGGING_FACE = "the Hugging Face plan"
_NOTHING = ("replicate", "local_params", "moe_identity_expert", "sequence_parallel")
"""Styles that neither split a parameter nor sum a result."""

_WHOLE = {
    "mla_kv_a_proj": "its weight is whole on every rank; a part of its gradient is summed",
    "replicated_with_grad_allreduce": "its weight is whole on every rank; its gradient is summed",
}
_REPLACED = "its forward was already replaced"
_NO_GEMM = "an embedding has no GEMM to hide behind"


class Plan:
    """The styles of parallel modules, by patterns of names.

    Attributes:
        styles: the name of a style, by pattern.
        given: whether the user gave it; a model's own plan may not have been applied.
        prefix: the name of the model that has the plan.
        group: the group that the model is split over, if the plan has it.
        loaded: whether transformers has loaded this model, and not one that contains it.
        applied: whether linear layers show that the plan was applied.
    """

    def __init__(
        self, styles: Mapping[str, str], given: bool, prefix: str = "", group: Any = None,
        loaded: bool = False,
    ) -> None:  # fmt: skip
        self.styles, self.given, self.prefix = dict(styles), given, prefix
        self.group, self.loaded, self.applied = group, loaded, False

    def pattern(self, name: str) -> str | None:
        """Return the pattern that matches a name, or an adapter's name for its base layer."""
        inner = name.removeprefix(self.prefix).removeprefix(".")
        adapted = ".".join(part for part in inner.split(".") if part != BASE_LAYER)
        return matching(inner, self.styles) or matching(adapted, self.styles)

    def style(self, name: str) -> str | None:
        """Return the style of a module or parameter, or None."""
        pattern = self.pattern(name)
        return None if pattern is None else self.styles[pattern]

    def holds(self, name: str) -> bool:
        """Return whether a name is that of the model which has the plan, or of a part of it."""
        return not self.prefix or f"{name}.".startswith(f"{self.prefix}.")

    def must_overlap(self, name: str, module: Module) -> bool:
        """Return whether only ficco would exchange the data of a module.

        True for local shards that the user's plan names. DTensors, and hooks that make them,
        communicate without ficco.
        """
        return (
            self.given
            and isinstance(module, Linear)
            and not isinstance(module.weight, DTensor)
            and self.pattern(name) is not None
            and not has_style_hook(module)
        )


class Plans:
    """The user's plan, or the plans of all models of a tree, outer models first."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = plans

    def of(self, name: str) -> Plan | None:
        """Return the plan of the nearest model above a module.

        Parts of a loaded model have plans, too, which the user's changes do not reach.
        """
        above = [plan for plan in self.plans if plan.holds(name)]
        loaded = [plan for plan in above if plan.loaded]
        named = [plan for plan in above if plan.pattern(name) is not None]
        return next(reversed(loaded or named or above), None)

    def look(self, name: str, module: Module, splits: Splits, group: Any) -> Found | Left | None:
        """Return what a plan says of a module, or None.

        Args:
            name: of the module.
            module: the module.
            splits: what of the model is split.
            group: of layers whose plan has none.

        Raises:
            InputError: the user's plan does not fit the module.
        """
        plan = self.of(name)
        group = group if plan is None or plan.group is None else plan.group
        if plan is not None and plan.given:
            return _given(name, module, plan, group)
        wrapper = wrapper_of(module)
        style = plan.style(name) if plan is not None else None
        if "self" in wrapper:
            style = style_name(wrapper["self"])
        if style is None or style in _NOTHING or _is_adapter(module):
            return None  # an adapter has the name of its base layer, which has the style
        words = f"{style} of {_HUGGING_FACE}"
        if isinstance(module, Linear) and style in _STYLES:
            return _linear(name, module, style, words, False, group)
        if wrapper or _is_applied(module, plan, splits):
            return _not_overlapped(name, module, style, words, splits)
        return None

    def parameters(self, name: str, module: Module, splits: Splits, listed: bool) -> list[Left]:
        """Return a module's own parameters that are split, each with the reason why it is left.

        Args:
            name: of the module.
            module: the module, which is not overlapped.
            splits: what of the model is split.
            listed: whether the module itself is listed; then only parameters with styles are.
        """
        plan, found = self.of(name), []
        split = splits.parameters(module)
        for key, parameter in parameters_of(module).items():
            full = f"{name}.{key}" if name else key
            style = plan.style(full) if plan is not None and not plan.given else None
            named = style is not None and style not in _NOTHING
            if named and (key in split or _is_applied(module, plan, splits)):
                words = f"{style} of {_HUGGING_FACE}"
            elif key in split and not listed:
                words = "DTensor" if isinstance(parameter, DTensor) else "tensor-parallel"
            else:
                continue
            why = f"it is a parameter of {class_name(module)}, which is not a linear layer"
            if isinstance(module, Linear):  # its bias is split as its weight is
                replaced = "forward" in module.__dict__
                why = (
                    _REPLACED
                    if replaced
                    else "it has no hook of ColwiseParallel or RowwiseParallel"
                )
                return [Left(name, f"{words} weight", why)]
            found.append(Left(full, words, why, parameter.dim() > 1))
        return found


def plans_of(model: Module, plan: Mapping[str, str] | None, group: Any) -> Plans:
    """Return the user's plan, else the plans of the models in `model`.

    Raises:
        InputError: the user's plan is not a mapping, or one of its patterns matches nothing.
    """
    named = dict(model.named_modules())
    if plan is not None:
        if not isinstance(plan, Mapping) or not all(isinstance(v, str) for v in plan.values()):
            raise InputError(
                f"plan: {shown(plan)} found; it must map patterns of names to styles, as in "
                "{'layers.*.q_proj': 'colwise'}"
            )
        _check_aliases(model, plan)
        check_patterns("plan", plan, list(named))
        return Plans([Plan(plan, True)])
    plans = []
    for prefix, module in named.items():
        styles = module.__dict__.get(TP_PLAN)  # Hugging Face: includes the module's children
        if isinstance(styles, dict) and styles:
            styles = _with_experts(styles, module)
            mesh = module.__dict__.get(DEVICE_MESH)
            plans.append(Plan(styles, False, prefix, _tensor_parallel(mesh, group), bool(mesh)))
    for name, module in named.items() if plans else ():
        owner = Plans(plans).of(name)
        if isinstance(module, Linear) and owner is not None and owner.style(name) in _STYLES:
            whole = (module.out_features, module.in_features)
            plain = not isinstance(module.weight, DTensor)
            owner.applied |= plain and tuple(module.weight.shape) != whole
    return Plans(plans)


def _with_experts(styles: Mapping[str, str], model: Module) -> dict[str, str]:
    """Return a model's styles, those of expert parallelism in place of the experts' others."""
    options = getattr(getattr(model, "config", None), "distributed_config", None)
    size = getattr(options, "ep_size", 1) or 1
    experts = model.__dict__.get(EP_PLAN)
    if not isinstance(experts, dict) or not (
        size > 1 or getattr(options, "enable_expert_parallel", False)
    ):
        return dict(styles)
    return {**styles, **experts}


def _is_applied(module: Module, plan: Plan | None, splits: Splits) -> bool:
    """Return whether anything shows that transformers has applied a plan to a module."""
    return bool(
        HOOKED in module.__dict__
        or has_style_hook(module)
        or splits.parameters(module)
        or (plan is not None and plan.applied)
    )


def _not_overlapped(
    name: str, module: Module, style: str, words: str, splits: Splits
) -> Left:  # fmt: skip
    """Return why a module with an applied style is left unchanged."""
    if isinstance(module, torch.nn.Embedding):
        return Left(name, words, _NO_GEMM, False)
    if style in _WHOLE and not splits.parameters(module):
        return Left(name, words, _WHOLE[style], False)
    if style in _STYLES:
        return Left(name, words, f"{class_name(module)} is not a linear layer")
    return Left(name, words, f"ficco has no style {style}")


def _given(name: str, module: Module, plan: Plan, group: Any) -> Found | Left | None:
    """Return what the user's plan says of a module.

    Raises:
        InputError: the plan does not fit the module.
    """
    adapter = _is_adapter(module)
    pattern = plan.pattern(f"{name}.{BASE_LAYER}" if adapter else name)
    if pattern is None:
        return None
    style = plan.styles[pattern]
    if style not in _STYLES:
        raise InputError(
            f"plan[{pattern!r}]={style!r}{closest(style, _STYLES)}; ficco overlaps "
            f"{', '.join(_STYLES)}"
        )
    words = f"{style} of the given plan"
    if isinstance(module, torch.nn.Embedding):
        return Left(name, words, _NO_GEMM, False)
    if adapter:
        _check_adapter(name, module, style, plan)
        return None
    if not isinstance(module, Linear):
        raise InputError(
            f"plan[{pattern!r}] names {name or 'the model itself'}, a {class_name(module)}; name "
            "linear layers"
        )
    return _linear(name, module, style, words, True, group)


def _is_adapter(module: Module) -> bool:
    return any(name == BASE_LAYER for name, _ in module.named_children())


def _check_adapter(name: str, adapter: Module, style: str, plan: Plan) -> None:
    """Refuse an adapter of which the user's plan names the base layer alone.

    The adapter's own layers hold shards of the base layer's size, and only ficco can sum their
    results or gradients.

    Raises:
        InputError: the plan does not name such a layer.
    """
    kind, dim = ("rowwise", 1) if style.startswith("row") else ("colwise", 0)
    base: Any = adapter.get_submodule(BASE_LAYER)
    while _is_adapter(base):
        base = base.get_submodule(BASE_LAYER)
    for part, layer in adapter.named_modules(prefix=name):
        own = isinstance(layer, Linear) and BASE_LAYER not in part.removeprefix(name).split(".")
        if own and layer.weight.shape[dim] == base.weight.shape[dim] and plan.style(part) is None:
            raise InputError(
                f"plan: {name} is an adapter, a {class_name(adapter)}. Its {part} holds a shard, "
                f"too, and nothing sums its {'results' if dim else 'gradients'} over the ranks. "
                f"Name it in plan=, as in {{{part!r}: {kind!r}}}"
            )


def _linear(
    name: str, module: Linear, style: str, words: str, given: bool, group: Any
) -> Found | Left | None:
    """Return what a style says of a linear layer; None: the plan was not applied to it.

    Raises:
        InputError: its weight is neither whole nor a shard.
    """
    weight: Any = module.weight
    dim = 0 if style.startswith("col") else 1
    split, hooked = isinstance(weight, DTensor), has_style_hook(module)
    if not given and split and (hooked or not wrapper_of(module)):
        return None
    sizes = (module.out_features, module.in_features)
    plain = not (given or split or is_lazy(weight)) and weight.dim() == 2
    if plain and weight.shape[dim] == sizes[dim] and dist.get_world_size(group) > 1:
        return None  # it is whole
    if left := unfit(name, module, words, Linear.forward):
        return left
    if split:
        mesh, placement = _parallel_part(weight, module)
        if mesh is None or not placement.is_shard(dim):
            return Left(name, words, f"its weight is a DTensor split as {weight.placements}")
        group = mesh.get_group()
    world, what = dist.get_world_size(group), ("out_features", "in_features")[dim]
    whole = weight.shape[dim] * (1 if split else world)
    if not split and weight.shape[dim] not in (sizes[dim], -(-sizes[dim] // world)):
        raise InputError(
            f"{name}: its weight is {list(weight.shape)} and {what}={sizes[dim]} on {world} "
            f"ranks; a shard needs {what}/{world}, or {what} itself if that is the shard's size"
        )
    why = ""
    if whole % world:
        why = f"{what}={whole} is not divisible by {world} ranks"
    elif hooked:
        why = "its hooks turn inputs and outputs into DTensors"
    elif not _replaceable(module):
        why = _REPLACED
    if why:
        return Left(name, words, why)
    if dim == 1:
        forward = plan_forwards.checked_row if given and not split else plan_forwards.row
        cuts = style in _CUT
        notes = ["its input is whole; PyTorch gathers its input's gradient"] if cuts else []
        return Found(name, words, "row", module, group, forward, cuts_input=cuts, notes=notes)
    gathered = style in GATHERED
    forward = plan_forwards.column_gathered if gathered else plan_forwards.column
    notes = ["PyTorch gathers its output afterwards"] if gathered else []
    reads = (words, weight.shape[1], weight.dtype, split)
    return Found(name, words, "column", module, group, forward, reads, notes=notes)


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


def _replaceable(module: Module) -> bool:
    """Return whether a module's forward is its class's, or Hugging Face's wrapper of it."""
    forward = module.__dict__.get("forward")
    if forward is None:
        return True
    closure = closure_of(forward)
    inner = getattr(closure.get("original_forward"), "__func__", None)
    return inner is type(module).forward and "mesh" in closure
