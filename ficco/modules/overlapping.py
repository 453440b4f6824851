"""overlap() and restore(): the tensor-parallel layers of a model, overlapped in place.

Everything is looked at before anything is changed, and an error while changing undoes all of it.
Parameters, buffers, state_dict, classes and hooks of the model stay; a layer gets a forward of its
own as an attribute of the instance, hooks of parallel styles are exchanged in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from types import MethodType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ficco.errors import InputError
from ficco.modules import groups
from ficco.modules.auto import AUTO
from ficco.modules.error_context import naming
from ficco.modules.layers import dtensor, megatron
from ficco.modules.layers.choosing import check_schedule
from ficco.modules.layers.finding import Found
from ficco.modules.layers.layer import ATTRIBUTE, Layer, Left, Options, Ranks, layer_of, ranks_of
from ficco.modules.layers.plans import Plan, check_patterns, matching, plan_of
from ficco.modules.layers.sharing import Sharing
from ficco.private.torch_layers import AFTER, ALWAYS, BEFORE, HOOKS_ARE_KNOWN, hooks_after
from ficco.schedule import Schedule

__all__ = ["RECORD", "Overlapped", "overlap", "restore"]

RECORD = "_ficco_overlapped"  # under which an overlapped model carries its record

_UNWANTED = "schedule= says so"
_HIDDEN = "this release of PyTorch does not show a module's hooks"
_OWN = "__dict__"
_BEGIN, _SETTLE, _CLEAR = "ficco begin ", "ficco settle ", "ficco clear "  # hooks, and a number

Module = torch.nn.Module
Schedules = str | Schedule | Mapping[str, str | Schedule | None]


@dataclass(slots=True, eq=False)
class Overlapped:
    """What `overlap` did to a model, and how to undo it.

    Attributes:
        modules: that are overlapped; each carries its Layer.
        left: tensor-parallel modules that stayed as they were.
        replaced: (module, name of its dictionary, key, value before); None: there was no value.
    """

    modules: list[Module] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    replaced: list[tuple[Module, str, Any, Any]] = field(default_factory=list)

    def replace(self, module: Module, dictionary: str, key: Any, value: Any) -> None:
        """Set an entry of a module's dictionary, so that `undo` sets it back."""
        where = getattr(module, dictionary)
        self.replaced.append((module, dictionary, key, where.get(key)))
        where[key] = value

    def undo(self) -> None:
        """Set everything back, the last first."""
        for module, dictionary, key, value in reversed(self.replaced):
            where = getattr(module, dictionary)
            if value is None:
                where.pop(key, None)
            else:
                where[key] = value


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

    Found are linear layers that PyTorch's `parallelize_module`, a Hugging Face model's own plan or
    `plan` has made parallel, and Megatron-Core's. What the model computes stays the same, but for
    the order of sums. `ficco.explain(module)` says what was done; `ficco.restore(module)` undoes
    it. Call it on every rank, after the model is parallelized and before torch.compile.

    Args:
        module: the model, or a part of it.
        group: a ProcessGroup or a DeviceMesh of one dimension that the layers are split over; None:
            the one that each layer knows, else all ranks.
        plan: "colwise" or "rowwise" (or "colwise_gather_output") by pattern of names, for layers
            whose weights are shards already and whose input is whole on every rank.
        schedule: a schedule, its name or "auto"; or a mapping of patterns of names to those, where
            None leaves a layer as it is, and a layer that no pattern matches takes "auto".
        strict: refuse a model of which some linear layer cannot be overlapped.
        share: let layers of one parent that read the same tensor (q, k, v; gate, up) share one
            gather. False: for a model that writes it between them in a way that PyTorch does not
            count, through `.data` or by a collective in place.
        save_gathered: keep gathered inputs for the weights' gradients, as PyTorch does. False: keep
            this rank's part alone, 1/p of that, and gather once more in backward, which takes
            longer.
        contiguous: results of layers that split [batch, sequence, hidden] along the sequence lie in
            memory as without ficco, which costs a copy where the batch is not 1. False: they are
            views of [sequence, batch, hidden], which `.view(-1, n)` refuses.

    Returns:
        `module`.

    Raises:
        InputError: nothing in it is tensor-parallel, it is overlapped already, an argument does not
            fit, or `strict` has a reason; ScheduleError: a layer's operator has no such schedule.
            Nothing has changed then.
    """
    if not isinstance(module, Module):
        raise InputError(f"module: {type(module).__name__} found; pass a torch.nn.Module")
    named = dict(module.named_modules())
    if again := next((n for n, m in named.items() if _touched(m)), None):
        raise InputError(f"{again} is overlapped already; call ficco.restore() on the model first")
    if _touched(module):
        raise InputError("the module is overlapped already; call ficco.restore(module) first")
    ranks = ranks_of(group)
    chosen = _chooser(schedule, list(named))
    found, left = _look(named, plan_of(module, plan, None if group is None else ranks.group), ranks)
    found, left, gathers = _settle(named, found, left, chosen)
    _check(found, left, group, ranks, strict)
    record = Overlapped(left=left)
    try:
        known: dict[Any, Ranks] = {ranks.group: ranks}
        for each in found:
            place = known.setdefault(each.group, Ranks(each.group))
            asked = chosen(each.name) or AUTO
            options = Options(asked, save_gathered and each.gathers, contiguous)
            _wrap(each, place, options, record)
            check_schedule(layer_of(each.module))
        for parent, gathering in gathers:
            record.replace(parent, BEFORE, gathering.key, gathering.hook)
        if share and HOOKS_ARE_KNOWN:
            _share(named, found, record)
        record.replace(module, _OWN, RECORD, record)
    except BaseException:
        record.undo()
        raise
    groups.log.info(
        "overlap: %d layers can overlap, %d are left as they were; which of them do is chosen at "
        "their first call, and ficco.explain(model) then tells", len(found), len(left),
    )  # fmt: skip
    return module


def restore(module: Module) -> Module:
    """Undo `overlap` on a model, and on parts of it that were overlapped one by one.

    Returns:
        `module`, as it was before.

    Raises:
        InputError: nothing in it is overlapped, or it is a part of what was overlapped as a whole.
    """
    if not isinstance(module, Module):
        raise InputError(f"module: {type(module).__name__} found; pass a torch.nn.Module")
    records = [m for m in module.modules() if RECORD in m.__dict__]
    if not records:
        part = any(ATTRIBUTE in m.__dict__ for m in module.modules())
        what = "is a part of an overlapped model; pass that" if part else "is not overlapped"
        raise InputError(f"the module {what}, so there is nothing to restore here")
    for each in records:
        each.__dict__[RECORD].undo()
    return module


def _touched(module: Module) -> bool:
    return ATTRIBUTE in module.__dict__ or RECORD in module.__dict__


def _look(
    named: Mapping[str, Module], plan: Plan | None, ranks: Ranks
) -> tuple[list[Found], list[Left]]:
    found: list[Found] = []
    left: list[Left] = []
    for name, module in named.items():
        answer = plan.look(name, module, plan.group or ranks.group) if plan is not None else None
        answer = answer or dtensor.look(name, module)
        answer = answer or megatron.look(name, module, ranks.group)
        if isinstance(answer, Found):
            found.append(answer)
        elif answer is not None:
            left.append(answer)
    if not HOOKS_ARE_KNOWN:  # those of a DTensor layer may do what its forward would do, too
        hidden = [each for each in found if isinstance(each.module.weight, DTensor)]
        left += [Left(each.name, each.style, _HIDDEN) for each in hidden]
        found = [each for each in found if each not in hidden]
    return found, left


def _settle(
    named: Mapping[str, Module],
    found: list[Found],
    left: list[Left],
    chosen: Callable[[str], str | Schedule | None],
) -> tuple[list[Found], list[Left], list[tuple[Module, dtensor.Gathering]]]:
    """Leave what the user wants to leave, and what a parent that keeps its gather feeds."""
    for each in found:
        if chosen(each.name) is None:
            left.append(Left(each.name, each.style, _UNWANTED, False))
    found = [each for each in found if chosen(each.name) is not None]
    gathers = {name: g for name, m in named.items() if (g := dtensor.gathering_of(m)) is not None}
    fed: dict[str, list[Found]] = {}
    for each in found:
        feeder = _feeder(each.name, gathers)
        if each.reads is not None and feeder is not None:
            fed.setdefault(feeder, []).append(each)
    passing = []
    for name, columns in fed.items():
        readers = [each.name for each in left if each.style == dtensor.COLUMN]
        whole = next((each for each in readers if _feeder(each, gathers) == name), None)
        why = gathers[name].why or (
            f"{whole} reads its input, and stays as it was" if whole else ""
        )
        if why:
            why = f"{name or 'the model'} keeps its gather: {why}"
            left += [Left(each.name, each.style, why) for each in columns]
            found = [each for each in found if each not in columns]
        else:
            passing.append((named[name], gathers[name]))
            for each in columns:
                each.gathers = True
    return found, left, passing


def _feeder(name: str, gathers: Mapping[str, Any]) -> str | None:
    """Return the nearest module above a layer that gathers its input before its forward."""
    while name:
        name = name.rpartition(".")[0]
        if name in gathers:
            return name
    return None


def _check(
    found: Sequence[Found], left: Sequence[Left], group: Any, ranks: Ranks, strict: bool
) -> None:
    """Refuse what cannot be overlapped as a whole.

    Raises:
        InputError: see `overlap`.
    """
    unwanted = sum(each.why == _UNWANTED for each in left)
    if not found and unwanted == len(left) > 0:
        raise InputError(
            f"schedule: it leaves all {unwanted} tensor-parallel layers that were found as they "
            "are, so there is nothing to overlap; name a schedule for some"
        )
    if not found and not any(each.overlappable for each in left):
        raise InputError(
            "module: no tensor-parallel layer to overlap was found in it; parallelize it first "
            "(torch.distributed.tensor.parallel.parallelize_module, a Hugging Face tp_plan, "
            "Megatron-Core), or say which layers hold shards by plan={pattern: style}"
        )
    members = torch.distributed.get_process_group_ranks
    for each in found:
        if torch.distributed.get_rank(each.group) < 0:
            raise InputError(
                f"{each.name}: this process is not a rank of the group it is split over"
            )
        if group is not None and members(each.group) != members(ranks.group):
            raise InputError(
                f"{each.name} is split over ranks {members(each.group)}, group= has "
                f"{members(ranks.group)}; pass that group, or None"
            )
    devices: dict[str, str] = {}
    for each in found:
        if isinstance(each.module.weight, torch.Tensor):
            devices.setdefault(str(each.module.weight.device), each.name)
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise InputError(f"module: its layers are on several devices ({places}); move it to one")
    refused = [each for each in left if each.overlappable]
    if strict and refused:
        lines = "".join(f"\n  {each.name} ({each.style}): {each.why}" for each in refused)
        raise InputError(
            f"strict=True, and {len(refused)} tensor-parallel layers cannot be overlapped:{lines}"
        )


def _wrap(found: Found, ranks: Ranks, options: Options, record: Overlapped) -> None:
    module = found.module
    layer = Layer(
        found.name, found.style, found.kind, ranks, options, list(found.notes), found.input_dim,
        found.gathers, found.output_dim, found.returns_local,
    )  # fmt: skip
    for key in found.passed:
        record.replace(module, BEFORE, key, dtensor.pass_on)
    for key in found.passed_after:
        record.replace(module, AFTER, key, dtensor.pass_on)
    record.replace(module, _OWN, ATTRIBUTE, layer)
    record.replace(module, _OWN, "forward", MethodType(_naming(found.forward), module))
    record.modules.append(module)


@cache
def _naming(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward whose errors, and those of its backward, name the layer."""

    @wraps(forward)
    def run(module: Module, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():  # what is compiled has no frames of layers
            return forward(module, *args, **options)
        return naming(layer_of(module).name, forward, module, *args, **options)

    return run


def _share(named: Mapping[str, Module], found: Sequence[Found], record: Overlapped) -> None:
    """Let column layers of one parent that read alike share what they do with their input."""
    alike: dict[Any, list[Module]] = {}
    for each in found:
        parent = each.name.rpartition(".")[0]
        called = each.name and type(named[parent]).forward is not Module.forward
        if each.reads is not None and called:  # a ModuleList is never called
            layer = layer_of(each.module)
            key = (parent, each.reads, each.group, layer.options.schedule)
            alike.setdefault(key, []).append(each.module)
    for (parent, *_), members in alike.items():
        if len(members) < 2:
            continue
        sharing = Sharing(parent, members)
        for place, member in enumerate(members):
            layer = layer_of(member)
            layer.sharing, layer.place = sharing, place
        _hook(sharing, named[parent], record)


def _hook(sharing: Sharing, parent: Module, record: Overlapped) -> None:
    """Let a forward of the parent begin and end what its layers share.

    As register_forward_hook does, but under keys that are alike in all blocks of a model: by a
    number that no other hook has, torch.compile would tell them apart and compile each by itself.
    """
    hooks = hooks_after(parent)
    number = sum(str(key).startswith(_SETTLE) for key in hooks)
    settle, clear = f"{_SETTLE}{number}", f"{_CLEAR}{number}"
    record.replace(parent, BEFORE, f"{_BEGIN}{number}", sharing.begin)
    record.replace(parent, AFTER, settle, sharing.settle)
    record.replace(parent, AFTER, clear, sharing.clear)
    record.replace(parent, ALWAYS, clear, True)


def _chooser(schedule: Schedules, names: list[str]) -> Callable[[str], str | Schedule | None]:
    """Return what gives a layer's schedule by its name.

    Raises:
        InputError: a pattern names no module; ScheduleError: a schedule that does not exist.
    """
    patterns = dict(schedule) if isinstance(schedule, Mapping) else {"*": schedule}
    if isinstance(schedule, Mapping):
        check_patterns("schedule", patterns, names)
    for value in patterns.values():
        if value is None or isinstance(value, Schedule):
            continue
        if not isinstance(value, str):
            kind = type(value).__name__
            raise InputError(f"schedule: {kind} found; it is a Schedule, its name, or 'auto'")
        if value != AUTO:
            Schedule.named(value)

    def chosen(name: str) -> str | Schedule | None:
        pattern = matching(name, patterns)
        return AUTO if pattern is None else patterns[pattern]

    return chosen
