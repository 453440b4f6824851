"""explain(): a text that describes, layer by layer, what overlap() did to a model and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from ficco.api import groups, layer_timing
from ficco.api.auto import AUTO
from ficco.api.host_profile import profile_note
from ficco.api.layer_timing import unmeasured
from ficco.api.layers.choosing import choice_of, problem_of, schedule_of
from ficco.api.layers.experts import Experts
from ficco.api.layers.layer import Layer, Left, layer_of
from ficco.api.overlapping import RECORD, Overlapped, added
from ficco.core.checking import true_or_false
from ficco.core.errors import InputError, counted
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

OVERLAPS, SERIAL, PLAIN = "overlap", "serial", "in plain torch.distributed"  # states of a layer
LATER = "to be chosen at the first call"
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")  # between dots or the ends of a name

Module = torch.nn.Module


class Explanation(str):
    """A string that the Python prompt prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def explain(module: Module, *, measure: bool = False) -> Explanation:
    """Describe what `overlap` did to a model: every tensor-parallel layer, and why.

    Each entry gives the layer's style, the operator that runs, the schedule with the selector's
    reasons, and the gain over `serial`: measured if the tuning table has the shape, otherwise
    predicted. Shapes are those of the last call; before the first call no schedule is chosen.
    Layers that were left unchanged have a reason. Layers with equal texts share one entry if
    their names differ only in indices, such as those of a ModuleList.

    Measurements made here are included, now and in later calls while the layer's last call matches
    a measured one: the speedup over `serial`, and milliseconds per call. "(emulated)" marks a
    machine that is slowed down to the speeds in its profile.

    Args:
        module: an overlapped model, or a module that contains one.
        measure: time every kind of call that the layers made last, and the same call by `serial`
            (on GPUs torch.distributed and torch.mm), and say why other calls are not timed. It is
            a collective call: all ranks of the layers' groups make it, after all called the model.
            A kind takes about 0.3 s, or the time of 10 pairs of calls if that is longer. Only
            forwards are timed (with gradients recorded if the call recorded them: "a forward"), on
            random data of the same shapes, without bias, in eager mode, back to back. Inputs are
            the same each time, so small ones may stay in caches. Figures are medians over rounds
            that alternate between the two schedules, of the slowest rank: equal on all ranks. The
            model, its gradients and torch's random state do not change.

    Returns:
        The text, one entry per layer; the Python prompt shows it without quotes.

    Raises:
        InputError: the module is not overlapped; or, with `measure`, it is on the meta device, a
            CUDA graph is being captured, or ranks called it differently.
        MemoryError: with `measure`, a rank has no memory for the data of a call.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))  # local shards: plan= says which
        >>> print(ficco.explain(ficco.overlap(model, plan={"0": "colwise"})))
        ficco runs 1 of 1 tensor-parallel layers: ...
    """
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"module: {type(module).__name__} found; pass a torch.nn.Module")
    records = {m: m.__dict__[RECORD] for m in module.modules() if RECORD in m.__dict__}
    if not records:
        raise InputError("the module is not overlapped; call ficco.overlap(module) first")
    if true_or_false(measure, "measure"):
        modules = [overlapped for record in records.values() for overlapped in record.modules]
        for overlapped in modules:
            if getattr(overlapped.weight, "is_meta", False):
                raise InputError(
                    f"measure=True: {layer_of(overlapped).name} is on the meta device; give the "
                    "model memory (to_empty) and call it first"
                )
        layer_timing.measure([layer_of(overlapped) for overlapped in modules])
    lines: list[str] = []
    for model, record in records.items():
        lines += _record(record, [*record.left, *added(model, record)], measure)
    return Explanation("\n".join(lines))


def _record(record: Overlapped, lefts: Sequence[Left], measured: bool) -> Iterator[str]:
    layers = [layer_of(module) for module in record.modules]
    total = len(layers) + sum(left.overlappable for left in lefts)
    yield from _head(layers, total)
    yield from _groups(layers)
    reasons: list[str] = []  # listed once at the end; entries refer to them by number
    named_texts = [
        (name, "\n".join(_layer(layer, reasons, measured))) for name, layer in _calls(layers)
    ]
    for names, text in _merged(named_texts):
        yield f"  {names}"
        yield from (f"    {line}" for line in text.split("\n"))
    for number, reason in enumerate(reasons, 1):
        yield f"  [{number}] {reason}"
    if record.experts:
        yield f"{counted(len(record.experts), 'module')} of experts:"
        named_texts = [(each.name, _experts(each, how)) for each, how in record.experts]
        for names, text in _merged(named_texts):
            yield f"  {names}"
            yield f"    {text}"
    if lefts:
        yield "left unchanged:"
        named_texts = [(left.name, f"{left.style}: {left.why}") for left in lefts]
        for names, text in _merged(named_texts):
            yield f"  {names}"
            yield f"    {text}"


def _experts(experts: Experts, schedule: str | Schedule) -> str:
    """Return a line on a module of experts."""
    name = schedule.name if isinstance(schedule, Schedule) else schedule
    shared = (
        "each rank takes its part of the tokens"
        if experts.shared
        else "ranks hold different tokens"
    )
    ranks = counted(experts.mesh.size(), "rank")
    return f"{experts.style} -> moe over {ranks}, where {shared}; schedule: {name}"


def _head(layers: Sequence[Layer], total: int) -> Iterator[str]:
    """Yield lines on how many layers overlap, how many do not, why, and what the user can do."""
    states = {layer: _state(layer) for layer in layers}
    counts = Counter(states.values())
    one_of = f"{len(layers)} of {total} tensor-parallel layers"
    if counts[OVERLAPS] == len(layers):
        yield f"ficco overlaps {one_of}"
        return
    order = (OVERLAPS, SERIAL, PLAIN, LATER)
    parts = [f"{counts[state]} {state}" for state in order if counts[state]]
    yield f"ficco runs {one_of}: {', '.join(parts)}"
    automatic = [s for s in layers if states[s] == SERIAL and _schedule_name(s) == AUTO]
    choices = [choice for layer in automatic if (choice := choice_of(layer)) is not None]
    unknown = sum(choice.predicted_ms is None for choice in choices)
    if unknown:
        yield (
            f"serial: {unknown} could overlap, but nothing is known about this machine's speeds: "
            "the reasons below say how to measure them"
        )
    if len(choices) > unknown:
        yield (
            f"serial: {len(choices) - unknown} could overlap, but serial is predicted to be "
            "fastest here, for the reasons below; ficco.overlap(model, schedule=NAME) overlaps "
            "them anyway, and ficco.explain(model, measure=True) then times both"
        )


def _schedule_name(layer: Layer) -> str:
    """Return the name of the schedule that the user gave a layer, or AUTO."""
    named = layer.options.schedule
    return named.name if isinstance(named, Schedule) else named


def _state(layer: Layer) -> str:
    """Return whether a layer overlaps: OVERLAPS, SERIAL, PLAIN or LATER."""
    try:
        stopped = groups.fallback_reason(layer.ranks.group) is not None
    except InputError:  # torch.distributed has ended
        stopped = True
    if groups.disabled() or stopped or layer.ranks.world == 1:
        return PLAIN
    name = _schedule_name(layer)
    if name == AUTO:
        choice = choice_of(layer)
        if choice is None:
            return LATER
        name = choice.schedule.name
    return SERIAL if name == "serial" else OVERLAPS


def _calls(layers: Iterable[Layer]) -> Iterator[tuple[str, Layer]]:
    """Yield the name and layer of every call; layers that share a call are one entry."""
    for layer in layers:
        together = _together(layer)
        if together and together[0] is not layer:
            continue
        parent, dot, name = layer.name.rpartition(".")
        if together:
            name = f"{{{', '.join(member.name.rpartition('.')[2] for member in together)}}}"
        yield parent + dot + name, layer


def _together(layer: Layer) -> list[Layer]:
    """Return the layers that share a call with this one, including itself; else an empty list."""
    sharing = layer.sharing
    if sharing is None or sharing.why_apart(layer.place):
        return []
    members = [layer_of(module) for module in sharing.members()]
    return members if len(members) > 1 else []


def _groups(layers: Iterable[Layer]) -> Iterator[str]:
    """Yield lines on each group: its size, its windows, and what keeps it from overlapping."""
    if groups.disabled():
        yield "nothing overlaps: FICCO_DISABLE turns every operator into plain torch.distributed"
    for group, ranks in {layer.ranks.group: layer.ranks for layer in layers}.items():
        try:
            members = torch.distributed.get_process_group_ranks(group)
        except KeyError:
            yield "their group has been destroyed: restore the model, and overlap it with another"
            continue
        yield f"group of {ranks.world} ranks {members}, windows {groups.window_bytes(group)} bytes"
        yield from filter(None, map(profile_note, groups.opened(group)))
        if reason := groups.fallback_reason(group):
            where = "" if groups.plain_reason(group, on_gpu=False) else " on its GPUs"
            yield f"nothing overlaps{where}; calls run plain torch.distributed: {reason}"
        if ranks.world == 1:
            yield "nothing is sent in a group of one rank"


def _layer(layer: Layer, reasons: list[str], measured: bool) -> Iterator[str]:
    operator = layer.seen.operator if layer.seen else layer.operator
    if operator == "column_matmul":
        operator += " (backward: matmul_all_reduce)"
    sharing, shared = layer.sharing, bool(_together(layer))
    reading = "which read" if sharing is not None and any(sharing.proven) else "if they read"
    more = f", one call for all, {reading} the same input" if shared else ""
    yield f"{layer.style} -> {operator}{more}"
    yield _schedule(layer, reasons, measured)
    if sharing is not None and not shared:
        why = sharing.why_apart(layer.place) or "the other layers of its parent read other inputs"
        yield f"computed alone: {why}"
    elif sharing is not None and sharing.uncounted:
        yield (
            "computed one by one in torch.inference_mode, which does not track writes to tensors; "
            "use torch.no_grad"
        )
    elif sharing is not None and sharing.outside:
        yield f"computed one by one where no forward of {sharing.parent!r} runs, as it was last"
    yield from layer.notes


def _schedule(layer: Layer, reasons: list[str], measured: bool) -> str:
    """Return a line on the schedule and its gain; with `measured`, also why it is not measured."""
    named, problem, why = layer.options.schedule, problem_of(layer), ""
    if measured and (reason := unmeasured(layer)):
        why = f"; not measured: {reason}"
    if groups.disabled():
        return f"schedule: none (FICCO_DISABLE){why}"
    if named != AUTO:
        name = named.name if isinstance(named, Schedule) else named
        return f"schedule: {name}, as requested{_measured(layer, True)}{why}"
    if layer.seen is None:
        return f"schedule: auto; chosen at the first call, when the number of rows is known{why}"
    if problem is None:
        return f"schedule: auto{why}"
    width = problem.n if problem.flow.sums else sum(layer.seen.widths)
    depth = problem.k // _cut(problem)
    shape = f"{problem.m} x {width} x {depth} {problem.dtype} a rank"
    choice = choice_of(layer)
    if choice is None:
        return f"schedule: auto, not chosen yet ({shape}){why}"
    chunked = "one shard in" if choice.schedule.taper == "edge" else "with"
    chunks = f" {chunked} {choice.schedule.chunks} chunks" if choice.schedule.chunks > 1 else ""
    verb = "measured" if choice.by in ("book", "measurement") else "expected"
    serial = [ms for s, ms in choice.alternatives if s.name == "serial"]
    gain = ""
    if choice.predicted_ms and serial:
        ratio, ms = serial[0] / choice.predicted_ms, choice.predicted_ms
        gain = f"; {verb} {ratio:.2f} times as fast as serial, {ms:.3f} ms a call"
    gain += _measured(layer, not gain) + why
    reason = "; ".join(choice.reasons)
    if reason not in reasons:
        reasons.append(reason)
    number = reasons.index(reason) + 1
    return (
        f"schedule: {choice.schedule.name}{chunks} ({shape}), by the {choice.by}{gain} [{number}]"
    )


def _measured(layer: Layer, alone: bool) -> str:
    """Return the measured time of a layer's last call, or an empty string.

    Args:
        layer: the layer.
        alone: whether the line has no other figure, so units must be spelled out.
    """
    timing = layer.measured.get(layer.seen) if layer.seen else None
    if timing is None or layer.seen is None or timing.schedule != schedule_of(layer):
        return ""
    where = "here (emulated)" if timing.paced else "here"
    than = " as serial" if alone else ""
    unit = " a forward" if layer.seen.recorded else " a call" if alone else ""
    ratio = timing.serial_ms / timing.ms
    return f"; measured {where} {ratio:.2f} times as fast{than}, {timing.ms:.3f} ms{unit}"


def _cut(problem: Problem) -> int:
    """Return the number of parts into which k is split."""
    return problem.world if problem.depths else 1


def _merged(named_texts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Join named_texts with equal texts whose names differ only in indices.

    An index is a whole part of a name: fc1 and fc2 stay apart.
    """
    names_of: dict[tuple[str, str], list[str]] = {}
    for name, text in named_texts:
        names_of.setdefault((_INDEX.sub("*", name), text), []).append(name)
    for (pattern, text), names in names_of.items():
        count = f" ({len(names)} layers)" if len(names) > 1 else ""
        yield (pattern if len(names) > 1 else names[0]) + count, text
