"""Layers that PyTorch's `parallelize_module` made parallel: DTensor weights, styles in hooks.

ColwiseParallel gathers its input in a forward pre-hook, where nothing can hide the gather. That
hook is replaced to pass its input on unchanged, and the layer's forward gathers while it
multiplies. RowwiseParallel sums in a forward hook. The layer's new forward returns the sum, so the
hook has nothing to do. Hooks that only wrap and unwrap DTensors are replaced too, unless another
hook runs between them and the forward.

PrepareModuleInput gathers before a parent whose layers read the whole input (attention, MLP). Its
hook is replaced to pass the input on split, as a DTensor, and the parent's column layers gather it.
PyTorch computes the same values with a split DTensor, so other readers are unaffected. A parent
keeps its gather if its code takes DTensors apart (`code_names`), or if a module under it has its
own PrepareModuleInput, which ignores how a DTensor is split.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, PrepareModuleOutput

from ficco.api.layers.code_names import names_used
from ficco.api.layers.finding import (
    Found,
    class_name,
    closure_of,
    local_of,
    refuse_transforms,
    unfit,
)
from ficco.api.layers.layer import Left, layer_of
from ficco.core.private.torch_layers import (
    LOCAL,
    column_input,
    column_output,
    hooks_after,
    hooks_before,
    prepare_input,
    prepare_named_input,
    row_input,
    row_output,
    sequence_input,
)

Module = torch.nn.Module
Tensor = torch.Tensor

COLUMN = "ColwiseParallel"  # the style's name
_LAYOUT_NAMES = {
    "to_local",
    "full_tensor",
    "redistribute",
    "placements",
    LOCAL,
    "device_mesh",
}


class _Style(NamedTuple):
    """A style, as read from one of its hooks.

    Attributes:
        key: of the hook.
        mesh: of the layer.
        arguments: first arguments of the style's function.
        function: the style's function.
    """

    key: int
    mesh: DeviceMesh
    arguments: tuple[Any, ...]
    function: Any


class Gathering(NamedTuple):
    """A parent whose PrepareModuleInput gathers for its layers.

    Attributes:
        key: of its forward pre-hook.
        hook: a replacement that does not gather.
        why: the reason why the parent must keep its gather, or an empty string.
    """

    key: int
    hook: Any
    why: str


def look(name: str, module: Module) -> Found | Left | None:
    """Return how `parallelize_module` has made a module parallel, or None."""
    if any(_sums_output(hook) for hook in hooks_after(module).values()):
        return Left(name, "PrepareModuleOutput", "it sums or moves the output of a whole module")
    before, after = _styles(hooks_before(module)), _styles(hooks_after(module))
    weight = getattr(module, "weight", None)
    if not isinstance(weight, DTensor):
        return None
    known = {column_input: "column", row_input: "row"}
    for style in before:
        if style.function is sequence_input:
            return None  # it has no GEMM
        if style.function not in known:
            continue
        kind = known[style.function]
        words = COLUMN if kind == "column" else "RowwiseParallel"
        if isinstance(module, torch.nn.Embedding):
            return Left(name, words, "an embedding has no GEMM to hide behind", False)
        return _linear(name, module, kind, words, style, after)
    return None


def _linear(
    name: str, module: Module, kind: str, words: str, style: _Style, after: Sequence[_Style]
) -> Found | Left:  # fmt: skip
    if left := unfit(name, module, words, torch.nn.Linear.forward):
        return left
    if "forward" in module.__dict__:
        return Left(name, words, "its forward was already replaced")
    own = column_output if kind == "column" else row_output
    outputs = [style for style in after if style.function is own]
    if len(outputs) != 1 or style.mesh.ndim != 1:
        return Left(name, words, "its hooks are not those of one style on a mesh of one dimension")
    weight: Any = module.weight
    dim, world = (0 if kind == "column" else 1), style.mesh.size()
    if weight.shape[dim] % world:
        what = "out_features" if kind == "column" else "in_features"
        why = f"{what}={weight.shape[dim]} is not divisible by {world} ranks"
        return Left(name, words, why)
    (given,), ((wanted,), to_local) = style.arguments[0], outputs[0].arguments  # layouts
    if kind == "column" and not (given.is_replicate() or (given.is_shard() and given.dim != -1)):
        return Left(name, words, f"its input is {given}, neither whole nor split by sequence")
    found = Found(name, words, kind, module, style.mesh.get_group(), _column)
    first, last = next(iter(hooks_after(module))), next(reversed(hooks_before(module)))
    if to_local and outputs[0].key == first and (kind == "row" or wanted == Shard(-1)):
        found.returns_local, found.passed_after = True, (first,)
    if kind == "row":
        if style.key == last and given == Shard(-1):
            found.passed = (last,)
        found.forward = _row
        if not (wanted.is_replicate() or wanted.is_shard()) or wanted == Shard(-1):
            return Left(name, words, f"its output is {wanted}, which no overlapped sum returns")
        found.output_dim = wanted.dim if wanted.is_shard() else None
        return found
    found.input_dim = given.dim if given.is_shard() else None
    found.gathers = given.is_shard()
    found.reads = (given, weight.shape[1], weight.dtype)
    found.passed = (style.key,)
    if wanted.is_replicate() or (wanted.is_shard() and wanted.dim not in (-1,)):
        found.notes = [f"PyTorch redistributes its output to {wanted} afterwards"]
    return found


def pass_on(module: Module, inputs: Any, output: Any = None) -> None:
    """Replace a style's hook whose work the layer's forward does."""


def _column(module: Module, input: Any) -> Any:
    """Run a column layer's forward: gather a split input while it multiplies."""
    layer = layer_of(module)
    if layer.sharing is None:
        return _columns([module], input)[0]
    return layer.sharing.result(module, layer.place, input, _columns)


def _columns(modules: Sequence[Module], x: Any) -> list[Any]:
    """Compute column layers that read the same x; return parts or DTensors, split by columns."""
    refuse_transforms()
    layer, mesh = layer_of(modules[0]), _mesh_of(modules[0])
    if not isinstance(x, DTensor):
        placement: Any = Replicate() if layer.input_dim is None else Shard(layer.input_dim)
        local, whole = x, None
        if not placement.is_replicate() and not _gatherable(placement, x.dim()):
            x = DTensor.from_local(x, mesh, [placement], run_check=False)
    if isinstance(x, DTensor):
        placement = x.placements[0]
        if not placement.is_replicate() and not _gatherable(placement, x.dim()):
            x = x.redistribute(placements=[Replicate()])
            placement = Replicate()
        local = x.to_local(grad_placements=[placement])
        whole = x.shape[placement.dim] if isinstance(placement, Shard) else None
    weights = [local_of(module.weight) for module in modules]
    biases = [local_of(module.bias) for module in modules]
    if isinstance(placement, Shard):
        ys = layer.gather(local, placement.dim % local.dim(), weights, biases, whole)
    else:
        ys = layer.columns(local, weights, biases)
    layer.note_shared(modules)
    return [
        y
        if layer_of(module).returns_local
        else DTensor.from_local(y, mesh, [Shard(-1)], run_check=False)
        for module, y in zip(modules, ys, strict=True)
    ]


def _row(module: Module, input: Any) -> Any:
    """Run a row layer's forward; its input is split along the last dimension."""
    refuse_transforms()
    layer, mesh = layer_of(module), _mesh_of(module)
    local = input
    if isinstance(input, DTensor):
        local = input.redistribute(placements=[Shard(-1)]).to_local()
    weight, bias = local_of(module.weight), local_of(module.bias)
    dim = None if layer.output_dim is None else layer.output_dim % local.dim()
    if dim is None:
        y = layer.reduce(local, weight, bias)
        return y if layer.returns_local else _replicated(y, mesh)
    if dim == local.dim() - 1:  # the sum is split by columns, which nothing overlaps
        shard = _replicated(layer.reduce(local, weight, bias), mesh).redistribute(
            placements=[Shard(dim)]
        )
        return shard.to_local() if layer.returns_local else shard
    if bias is not None:  # added to this rank's rows only, so its gradient must be summed
        bias = _SummedGradient.apply(bias, layer.ranks.group)  # type: ignore[no-untyped-call]
    y = layer.scatter(local, dim, weight, bias)
    if layer.returns_local:
        return y
    if local.shape[dim] % layer.ranks.world == 0:
        return DTensor.from_local(y, mesh, [Shard(dim)], run_check=False)
    shape = [*local.shape[:-1], weight.shape[0]]
    stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return DTensor.from_local(
        y.contiguous(), mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape),
        stride=tuple(stride),
    )  # fmt: skip


def _replicated(y: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(y, mesh, [Replicate()], run_check=False)


class _SummedGradient(torch.autograd.Function):
    """Identity on a tensor equal on all ranks; backward sums its gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _gatherable(placement: Any, dims: int) -> bool:
    return isinstance(placement, Shard) and placement.dim % dims != dims - 1


def _mesh_of(module: Module) -> DeviceMesh:
    weight: Any = module.weight
    mesh: DeviceMesh = weight.device_mesh
    return mesh


# ---- hooks


def _styles(hooks: Any) -> list[_Style]:
    """Return the styles in hooks that `distribute_module` has registered."""
    styles = []
    for key, hook in hooks.items():
        closure = closure_of(hook)
        function = closure.get("input_fn", closure.get("output_fn"))
        if isinstance(function, partial) and isinstance(closure.get("device_mesh"), DeviceMesh):
            styles.append(_Style(key, closure["device_mesh"], function.args, function.func))
    return styles


def gathering_of(parent: Module) -> Gathering | None:
    """Return the gather of a parent's PrepareModuleInput, or None."""
    if prepare_input is None or prepare_named_input is None:
        return None
    for key, hook in hooks_before(parent).items():
        closure = closure_of(hook)
        style, mesh = closure.get("self"), closure.get("device_mesh")
        if type(style) is not PrepareModuleInput or not isinstance(mesh, DeviceMesh):
            continue
        if (changed := _without_gather(style)) is None:
            continue
        why = "its PrepareModuleInput turns the gathered input into a local tensor"
        if not style.use_local_output:
            why = _needs_whole_input(parent, key)
        if style.with_kwargs:
            return Gathering(key, partial(_prepared_by_name, changed, mesh), why)
        return Gathering(key, partial(_prepared, changed, mesh), why)
    return None


def _without_gather(style: PrepareModuleInput) -> PrepareModuleInput | None:
    """Return a copy of a style that leaves inputs split; None: the style gathers none."""
    changed = copy.copy(style)
    gathers = False

    def ungathered(given: Any, wanted: Any) -> Any:
        nonlocal gathers
        if given is not None and wanted is not None and given.is_shard() and wanted.is_replicate():
            gathers = True
            return given
        return wanted

    if style.input_layouts is not None and style.desired_input_layouts is not None:
        pairs = zip(style.input_layouts, style.desired_input_layouts, strict=True)
        changed.desired_input_layouts = tuple(ungathered(*pair) for pair in pairs)
    changed.desired_input_kwarg_layouts = {
        name: ungathered(style.input_kwarg_layouts.get(name), wanted)
        for name, wanted in style.desired_input_kwarg_layouts.items()
    }
    return changed if gathers else None


def _prepared(style: PrepareModuleInput, mesh: DeviceMesh, module: Module, inputs: Any) -> Any:
    return prepare_input(style, inputs, mesh)


def _prepared_by_name(
    style: PrepareModuleInput, mesh: DeviceMesh, module: Module, inputs: Any, named: Any
) -> Any:
    return prepare_named_input(style, inputs, named, mesh)


def _output_layouts(hook: Any) -> list[tuple[Any, Any]]:
    """Return each output's layout, and the wanted one, if a hook is that of PrepareModuleOutput."""
    style = closure_of(hook).get("self")
    if not isinstance(style, PrepareModuleOutput):
        return []
    pairs = zip(style.output_layouts, style.desired_output_layouts, strict=True)
    return [(given, wanted) for given, wanted in pairs if given is not None]


def _declares_whole_output(hook: Any) -> bool:
    return any(given.is_replicate() for given, _ in _output_layouts(hook))


def _sums_output(hook: Any) -> bool:
    """Return whether a hook sums an output over the ranks, or moves parts of it."""
    pairs = _output_layouts(hook)
    return any(wanted not in (None, given) and not given.is_replicate() for given, wanted in pairs)


def _needs_whole_input(parent: Module, key: int) -> str:
    """Return why a parent's code needs a gathered input, or an empty string.

    Args:
        parent: the module whose PrepareModuleInput gathers.
        key: of that hook.
    """
    if any(_declares_whole_output(hook) for hook in hooks_after(parent).values()):
        return "its PrepareModuleOutput declares its output whole"
    for name, module in parent.named_modules():
        who = f"{name} ({class_name(module)})" if name else class_name(module)
        hooks = [hook for at, hook in hooks_before(module).items() if name or at != key]
        if any(type(closure_of(hook).get("self")) is PrepareModuleInput for hook in hooks):
            return f"{who} also has a PrepareModuleInput, which may assume a whole input"
        if names := sorted(names_used(module) & _LAYOUT_NAMES):
            return f"{who} takes DTensors apart by itself ({', '.join(names)})"
    return ""
