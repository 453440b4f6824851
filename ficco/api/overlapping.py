"""overlap() and restore(): overlap the tensor-parallel layers of a model in place.

The whole model is checked before anything is changed, and an error during the changes undoes them.
Parameters, buffers, state_dict and hooks of the model stay the same. A layer gets a subclass of its
class with a new forward; hooks of parallel styles are replaced at their positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ficco.api.auto import AUTO
from ficco.api.layers import autotp, dtensor, experts, megatron
from ficco.api.layers.choosing import check_schedule
from ficco.api.layers.finding import Found
from ficco.api.layers.layer import ATTRIBUTE, Layer, Left, Options, Ranks, Split, layer_of, ranks_of
from ficco.api.layers.plans import Plans, check_patterns, matching, plans_of
from ficco.api.layers.replacing import replace_forward, restore_forward
from ficco.api.layers.sharing import Sharing
from ficco.api.layers.splitting import Splits
from ficco.api.routes import SCRIPTING, refuse_script
from ficco.core.checking import true_or_false
from ficco.core.errors import InputError
from ficco.core.logs import log
from ficco.core.private.torch_layers import AFTER, ALWAYS, BEFORE, HOOKS_ARE_KNOWN, hooks_after
from ficco.plan.schedule import Schedule

RECORD = "_ficco_overlapped"  # the attribute of an overlapped model that holds its record

_LEFT_BY_USER = "schedule= says so"
_UNREAD = "no layer that can overlap reads the input which it gathers"
_ADDED = "it was added after overlap(); restore the model and overlap it again to overlap it"
_HOOKS_HIDDEN = "this release of PyTorch does not show a module's hooks"
_INSTANCE_DICT = "__dict__"
_BEGIN, _SETTLE, _CLEAR = "ficco begin ", "ficco settle ", "ficco clear "  # keys of hooks

Module = torch.nn.Module
Schedules = str | Schedule | Mapping[str, str | Schedule | None]


@dataclass(slots=True, eq=False)
class Overlapped:
    """The changes that `overlap` made to a model, so they can be undone.

    Attributes:
        modules: the overlapped modules; each has a Layer.
        experts: the overlapped modules of experts, with the schedule of each.
        left: tensor-parallel modules that were left unchanged.
        replaced: (module, name of its dictionary, key, old value); None: there was no value.
        ranks: of the group that layers without a group of their own are split over.
    """

    ranks: Ranks
    modules: list[Module] = field(default_factory=list)
    experts: list[tuple[experts.Experts, str | Schedule]] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    replaced: list[tuple[Module, str, Any, Any]] = field(default_factory=list)

    def replace(self, module: Module, dictionary: str, key: Any, value: Any) -> None:
        """Set an entry of a module's dictionary (None: remove it), and record the old value."""
        entries = getattr(module, dictionary)
        self.replaced.append((module, dictionary, key, entries.get(key)))
        _set(entries, key, value)

    def undo(self) -> None:
        """Restore all old values, the last change first, and the classes of layers."""
        for module in self.modules:
            restore_forward(module)
        for module, dictionary, key, value in reversed(self.replaced):
            _set(getattr(module, dictionary), key, value)


def _set(entries: dict[Any, Any], key: Any, value: Any) -> None:
    if value is None:
        entries.pop(key, None)
    else:
        entries[key] = value


def overlap(
    module: Module,
    group: Any = None,
    *,
    plan: Mapping[str, str] | None = None,
    schedule: Schedules = AUTO,
    strict: bool = False,
    share: bool = True,
    save_gathered: bool = True,
    contiguous: bool = True,
) -> Module:
    """Overlap the communication of a model's tensor-parallel layers with their GEMMs, in place.

    `overlap` finds linear layers that PyTorch's `parallelize_module`, a Hugging Face model's own
    plan or `plan` has made parallel, and the layers of Megatron-Core and of DeepSpeed's AutoTP.
    Column-parallel layers become `all_gather_matmul` or `column_matmul`, row-parallel layers
    `matmul_reduce_scatter` or `matmul_all_reduce`, forward and backward. The model computes the
    same values, except for the order of sums. `ficco.explain(module)` describes the changes;
    `ficco.restore(module)` undoes them. Call it on every rank, after the model is parallelized and
    before torch.compile.

    Args:
        module: the model, or a part of it.
        group: a ProcessGroup or a DeviceMesh of one dimension that the layers are split over; None:
            each layer's own group, else all ranks.
        plan: "colwise" or "rowwise" (or "colwise_gather_output", "rowwise_split_input") by pattern
            of whole dotted names, such as {"layers.*.q_proj": "colwise"}, for layers whose weights
            are already shards. The input of a column layer is whole on every rank.
        schedule: a Schedule, its name, or "auto" for the schedule of each layer that is predicted
            to be fastest; or a mapping of patterns of names to these. None in the mapping leaves a
            layer unchanged. It raises an error for layers of `plan`, because nothing else would sum
            their results. A layer that no pattern matches uses "auto".
        strict: refuse a model if something that is split or summed over the ranks, and could hide
            behind a GEMM, cannot be overlapped.
        share: let layers of one parent that read the same tensor (q, k, v; gate, up) share one
            gather. False: for a model that writes the tensor between them in a way that PyTorch
            does not record, through `.data` or by a collective in place.
        save_gathered: keep gathered inputs for the weights' gradients, as PyTorch does. False: keep
            only this rank's shard, 1/p of that, and gather again in backward, which takes longer.
        contiguous: results of layers that split [batch, sequence, hidden] along the sequence have
            the same strides as without ficco, which costs a copy if the batch is not 1. False:
            they are views of [sequence, batch, hidden], which `.view(-1, n)` refuses.

    Returns:
        `module`.

    Raises:
        InputError: nothing in it is tensor-parallel, it is already overlapped, an argument does not
            fit, local shards that `plan` names cannot be overlapped, or `strict` refuses the model.
            After an error the model is unchanged.
        ScheduleError: a layer's operator has no such schedule.

    Example:
        Every rank runs this, under torchrun (on GPUs with "cuda" and the backend nccl):

        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor import Shard
        >>> from torch.distributed.tensor.parallel import (
        ...     ColwiseParallel, RowwiseParallel, parallelize_module)
        >>> mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        >>> up, down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
        >>> model = torch.nn.Sequential(up, torch.nn.GELU(), down)
        >>> plan = {  # the activations between blocks are split along the sequence
        ...     "0": ColwiseParallel(input_layouts=Shard(0)),
        ...     "2": RowwiseParallel(output_layouts=Shard(0)),
        ... }
        >>> model = ficco.overlap(parallelize_module(model, mesh, plan))
        >>> model(torch.randn(8, 64)).sum().backward()  # 8 rows of this rank
        >>> print(ficco.explain(model))
        ficco ... 2 of 2 tensor-parallel layers...
        >>> model = ficco.restore(model)
    """
    if not isinstance(module, Module):
        raise InputError(f"module: {type(module).__name__} found; pass a torch.nn.Module")
    for name, value in (
        ("share", share), ("save_gathered", save_gathered), ("contiguous", contiguous),
        ("strict", strict),
    ):  # fmt: skip
        true_or_false(value, name)
    named = dict(module.named_modules())
    for name, part in named.items():
        if _is_overlapped(part):
            what = f"{name} is" if name else "the module is"
            raise InputError(f"{what} already overlapped; call ficco.restore() on the model first")
    ranks = ranks_of(group)
    chosen = _schedule_lookup(schedule, list(named))
    named_group = None if group is None else ranks.group
    plans = plans_of(module, plan, named_group)
    found, left = _search(named, plans, ranks, named_group)
    several = _experts(found, left, chosen)
    layers, left, gathers = _settle_gathers(named, _linear(found), left, chosen)
    _check_plan(named, left, plans)
    _check(layers, left, group, ranks, strict, bool(several))
    record = Overlapped(ranks, experts=several, left=left)
    try:
        known: dict[Any, Ranks] = {ranks.group: ranks}
        for entry in layers:
            place = known.setdefault(entry.group, Ranks(entry.group))
            option = chosen(entry.name) or AUTO
            options = Options(option, save_gathered and entry.gathers, contiguous)
            _wrap(entry, place, options, record)
            check_schedule(layer_of(entry.module))
        for each, how in several:
            record.replace(each.module, _INSTANCE_DICT, "forward", each.forward(how))
        for parent, gathering in gathers:
            record.replace(parent, BEFORE, gathering.key, gathering.hook)
        if share and HOOKS_ARE_KNOWN:
            _share(named, layers, record)
        record.replace(module, _INSTANCE_DICT, RECORD, record)
    except BaseException:
        record.undo()
        raise
    log.info(
        "overlap: %d layers can overlap, %d are left unchanged; schedules are chosen at the first "
        "call, and ficco.explain(model) then lists them", len(layers), len(left),
    )  # fmt: skip
    return module


def restore(module: Module) -> Module:
    """Undo `overlap` on a model, and on parts of it that were overlapped separately.

    It sends nothing, but a model must be overlapped on all ranks or on none when it is called.

    Args:
        module: the module that was passed to `overlap`, or one that contains it.

    Returns:
        `module`, in its original state.

    Raises:
        InputError: nothing in it is overlapped, or it is a part of a model overlapped as a whole.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> overlapped = ficco.overlap(model, plan={"0": "colwise"})
        >>> ficco.restore(model) is overlapped is model
        True
    """
    if not isinstance(module, Module):
        raise InputError(f"module: {type(module).__name__} found; pass a torch.nn.Module")
    records = [m for m in module.modules() if RECORD in m.__dict__]
    if not records:
        part = any(ATTRIBUTE in m.__dict__ for m in module.modules())
        what = "is a part of an overlapped model; pass that" if part else "is not overlapped"
        raise InputError(f"the module {what}, so there is nothing to restore here")
    for overlapped in records:
        overlapped.__dict__[RECORD].undo()
    return module


def _is_overlapped(module: Module) -> bool:
    return ATTRIBUTE in module.__dict__ or RECORD in module.__dict__


def added(module: Module, record: Overlapped) -> list[Left]:
    """Return what is split or summed in an overlapped model, and was not there when it was."""
    named = dict(module.named_modules())
    layers, left = _search(named, plans_of(module, None, None), record.ranks, None)
    before = {entry.name for entry in record.left}
    found: list[Any] = [*layers, *left]
    return [Left(each.name, each.style, _ADDED) for each in found if each.name not in before]


def _search(
    named: Mapping[str, Module], plans: Plans, ranks: Ranks, group: Any
) -> tuple[list[Found | experts.Experts], list[Left]]:
    """Find what is split over the ranks, or summed over them: each layer, module or parameter."""
    layers: list[Found | experts.Experts] = []
    left: list[Left] = []
    splits = Splits(named, [group])
    for name, module in named.items():
        if ATTRIBUTE in module.__dict__ or experts.is_overlapped(module):
            continue
        answer: Found | experts.Experts | Left | None = experts.look(name, module)
        answer = answer or plans.look(name, module, splits, ranks.group)
        answer = answer or dtensor.look(name, module)
        answer = answer or megatron.look(name, module, ranks.group)
        answer = answer or autotp.look(name, module, ranks.group)
        if isinstance(answer, (Found, experts.Experts)):
            layers.append(answer)
            continue
        if answer is not None:
            left.append(answer)
        left += plans.parameters(name, module, splits, answer is not None)
    if not HOOKS_ARE_KNOWN:  # hooks of a DTensor layer may repeat the work of its new forward
        linear = _linear(layers)
        hidden = [entry for entry in linear if isinstance(entry.module.weight, DTensor)]
        left += [Left(entry.name, entry.style, _HOOKS_HIDDEN) for entry in hidden]
        layers = [entry for entry in layers if entry not in hidden]
    return layers, left


def _linear(layers: Sequence[Found | experts.Experts]) -> list[Found]:
    return [entry for entry in layers if isinstance(entry, Found)]


def _experts(
    layers: Sequence[Found | experts.Experts],
    left: list[Left],
    chosen: Callable[[str], str | Schedule | None],
) -> list[tuple[experts.Experts, str | Schedule]]:
    """Return modules of experts with their schedules, and list those that the user excludes."""
    found = []
    for entry in layers:
        if isinstance(entry, experts.Experts):
            schedule = chosen(entry.name)
            if schedule is None:
                left.append(Left(entry.name, entry.style, _LEFT_BY_USER))
            else:
                found.append((entry, schedule))
    return found


def _settle_gathers(
    named: Mapping[str, Module],
    layers: list[Found],
    left: list[Left],
    chosen: Callable[[str], str | Schedule | None],
) -> tuple[list[Found], list[Left], list[tuple[Module, dtensor.Gathering]]]:
    """Leave out layers that the user excludes, and layers whose parent keeps its gather."""
    for entry in layers:
        if chosen(entry.name) is None:
            left.append(Left(entry.name, entry.style, _LEFT_BY_USER, False))
    layers = [entry for entry in layers if chosen(entry.name) is not None]
    gathers = {name: g for name, m in named.items() if (g := dtensor.gathering_of(m)) is not None}
    fed: dict[str, list[Found]] = {}
    for entry in layers:
        feeder = _gathering_parent(entry.name, gathers)
        if entry.reads is not None and feeder is not None:
            fed.setdefault(feeder, []).append(entry)
    for name in gathers.keys() - fed.keys():
        if not any(_gathering_parent(other.name, gathers) == name for other in left):
            left.append(Left(name, "PrepareModuleInput", _UNREAD))
    passing = []
    for name, columns in fed.items():
        readers = [other.name for other in left if other.style == dtensor.COLUMN]
        whole = next((r for r in readers if _gathering_parent(r, gathers) == name), None)
        why = gathers[name].why or (
            f"{whole} reads its input, and is left unchanged" if whole else ""
        )
        if why:
            why = f"{name or 'the model'} keeps its gather: {why}"
            left += [Left(entry.name, entry.style, why) for entry in columns]
            layers = [entry for entry in layers if entry not in columns]
        else:
            passing.append((named[name], gathers[name]))
            for entry in columns:
                entry.gathers = True
    return layers, left, passing


def _gathering_parent(name: str, gathers: Mapping[str, Any]) -> str | None:
    """Return the name of the nearest parent that gathers its input before its forward, or None."""
    while name:
        name = name.rpartition(".")[0]
        if name in gathers:
            return name
    return None


def _check_plan(named: Mapping[str, Module], left: Sequence[Left], plans: Plans) -> None:
    """Refuse to leave a layer unchanged if only ficco would exchange its data.

    Raises:
        InputError: the user's plan names such a layer.
    """
    for entry in left:
        plan, module = plans.of(entry.name), named.get(entry.name)
        if plan is not None and module is not None and plan.must_overlap(entry.name, module):
            raise InputError(
                f"plan: {entry.name} ({entry.style}) would be left unchanged: {entry.why}. Nothing "
                "else sums its results or gradients over the ranks. Remove it from plan= and sum "
                "them yourself, or correct the reason. If the reason is schedule=, name 'serial' "
                "there: it runs torch.distributed, without windows"
            )


def _check(
    layers: Sequence[Found], left: Sequence[Left], group: Any, ranks: Ranks, strict: bool,
    has_experts: bool,
) -> None:  # fmt: skip
    """Refuse a model that cannot be overlapped.

    Raises:
        InputError: see `overlap`.
    """
    unwanted = sum(entry.why == _LEFT_BY_USER for entry in left)
    if not layers and not has_experts and unwanted == len(left) > 0:
        raise InputError(
            f"schedule: it leaves all {unwanted} tensor-parallel layers unchanged, so there is "
            "nothing to overlap; name a schedule for some"
        )
    if not (layers or has_experts or any(entry.overlappable for entry in left)):
        raise InputError(
            "module: it has no tensor-parallel layer to overlap; parallelize it first "
            "(torch.distributed.tensor.parallel.parallelize_module, a Hugging Face tp_plan, "
            "Megatron-Core, DeepSpeed's AutoTP), or name the layers that hold shards by "
            "plan={pattern: style}"
        )
    members = torch.distributed.get_process_group_ranks
    for entry in layers:
        if torch.distributed.get_rank(entry.group) < 0:
            raise InputError(
                f"{entry.name}: this process is not a rank of the group it is split over"
            )
        if group is not None and members(entry.group) != members(ranks.group):
            raise InputError(
                f"{entry.name} is split over ranks {members(entry.group)}, group= has "
                f"{members(ranks.group)}; pass that group, or None"
            )
    devices: dict[str, str] = {}
    for entry in layers:
        if isinstance(entry.module.weight, torch.Tensor):
            devices.setdefault(str(entry.module.weight.device), entry.name)
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise InputError(f"module: its layers are on several devices ({places}); move it to one")
    refused = [other for other in left if other.overlappable]
    if strict and refused:
        lines = "".join(f"\n  {other.name} ({other.style}): {other.why}" for other in refused)
        raise InputError(
            f"strict=True, but {len(refused)} tensor-parallel layers cannot be overlapped:{lines}"
        )


def _wrap(entry: Found, ranks: Ranks, options: Options, record: Overlapped) -> None:
    module = entry.module
    split = {each.name: getattr(entry, each.name) for each in fields(Split)}
    layer = Layer(**split, ranks=ranks, options=options)
    for key in entry.passed:
        record.replace(module, BEFORE, key, dtensor.pass_on)
    for key in entry.passed_after:
        record.replace(module, AFTER, key, dtensor.pass_on)
    record.replace(module, _INSTANCE_DICT, ATTRIBUTE, layer)
    record.replace(module, _INSTANCE_DICT, SCRIPTING, refuse_script)
    record.replace(module, _INSTANCE_DICT, "forward", None)  # transformers' wrapper
    record.modules.append(module)
    replace_forward(module, entry.forward)


def _share(named: Mapping[str, Module], layers: Sequence[Found], record: Overlapped) -> None:
    """Let column layers of one parent with equal inputs share one call."""
    by_input: dict[Any, list[Module]] = {}
    for entry in layers:
        parent = entry.name.rpartition(".")[0]
        called = entry.name and type(named[parent]).forward is not Module.forward
        if entry.reads is not None and called:  # a ModuleList is never called
            layer = layer_of(entry.module)
            key = (parent, entry.reads, entry.group, layer.options.schedule)
            by_input.setdefault(key, []).append(entry.module)
    for (parent, *_), members in by_input.items():
        if len(members) < 2:
            continue
        sharing = Sharing(parent, members)
        for place, member in enumerate(members):
            layer = layer_of(member)
            layer.sharing, layer.place = sharing, place
        _hook(sharing, named[parent], record)


def _hook(sharing: Sharing, parent: Module, record: Overlapped) -> None:
    """Add hooks by which the parent's forward begins and ends the sharing of its layers.

    register_forward_hook would use a unique number as key, so torch.compile would compile every
    block of a model separately. These keys are equal in all blocks.
    """
    hooks = hooks_after(parent)
    number = sum(str(key).startswith(_SETTLE) for key in hooks)
    settle, clear = f"{_SETTLE}{number}", f"{_CLEAR}{number}"
    record.replace(parent, BEFORE, f"{_BEGIN}{number}", sharing.begin)
    record.replace(parent, AFTER, settle, sharing.settle)
    record.replace(parent, AFTER, clear, sharing.clear)
    record.replace(parent, ALWAYS, clear, True)


def _schedule_lookup(
    schedule: Schedules, names: list[str]
) -> Callable[[str], str | Schedule | None]:
    """Return a function that maps a layer's name to its schedule.

    Raises:
        InputError: a pattern matches no module; ScheduleError: a schedule does not exist.
    """
    patterns = dict(schedule) if isinstance(schedule, Mapping) else {"*": schedule}
    if isinstance(schedule, Mapping):
        check_patterns("schedule", patterns, names)
    for value in patterns.values():
        if value is None or isinstance(value, Schedule):
            continue
        if not isinstance(value, str):
            kind = type(value).__name__
            raise InputError(f"schedule: {kind} found; a Schedule, its name, or 'auto' is needed")
        if value != AUTO:
            Schedule.named(value)

    def chosen(name: str) -> str | Schedule | None:
        pattern = matching(name, patterns)
        return AUTO if pattern is None else patterns[pattern]

    return chosen
