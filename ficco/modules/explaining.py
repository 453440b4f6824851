"""explain(): what overlap() did to a model, layer by layer, with reasons; as a text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from ficco.errors import InputError
from ficco.modules import groups, layer_timing
from ficco.modules.auto import AUTO
from ficco.modules.host_profile import said_of
from ficco.modules.layer_timing import unmeasured
from ficco.modules.layers.choosing import choice_of, problem_of, schedule_of
from ficco.modules.layers.layer import Layer, layer_of
from ficco.modules.layers.sample_call import operator_of
from ficco.modules.overlapping import RECORD, Overlapped
from ficco.problem import Problem
from ficco.schedule import Schedule

__all__ = ["Explanation", "explain"]

OVERLAPS, SERIAL, PLAIN = "overlap", "serial", "in plain torch.distributed"  # states of a layer
LATER = "to be chosen at the first call"

Module = torch.nn.Module


class Explanation(str):
    """A text that a Python prompt shows as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def explain(module: Module, *, measure: bool = False) -> Explanation:
    """Say what `overlap` did to a model: every tensor-parallel layer, and why.

    For a layer: its style, the operator that runs, the schedule with the selector's reasons, and
    the gain over `serial` that is expected, or was measured where a book says so. Shapes are those
    of the last call; before one, no schedule is chosen. For those that were left as they were: why.
    Layers that differ in a number of their name only, and in nothing that is said, are one entry.

    What was measured here is said, too, and again later, wherever a layer's last call is like one
    that was: times faster than `serial`, and milliseconds a call. "(paced)" means: on a machine
    that is slowed to what its profile says.

    Args:
        module: an overlapped model, or what holds one.
        measure: time every kind of call that the layers made last, and the same by `serial` (on
            GPUs torch.distributed and torch.mm), and say why others are not timed. It is a
            collective call: all ranks of the layers' groups make it, after all called the model.
            A kind takes some 0.3 s, or 10 pairs of calls where these take longer. Timed are
            forwards alone, where gradients were recorded as such ("a forward"), not backward; on
            random data of the same shapes, without bias, eager, one call behind another. Inputs
            are the same each time, so small ones may stay in caches. Figures are medians over
            rounds, in which the two take turns, of the slowest rank: equal on all ranks. The model,
            its gradients and torch's random numbers stay as they are.

    Raises:
        InputError: nothing in the module is overlapped; or, to be measured, it is on the meta
            device, a CUDA graph is being captured, or ranks called it differently.
        MemoryError: a rank has no memory for the data of a call that is to be measured.
    """
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"module: {type(module).__name__} found; pass a torch.nn.Module")
    records = [m.__dict__[RECORD] for m in module.modules() if RECORD in m.__dict__]
    if not records:
        raise InputError("the module is not overlapped; call ficco.overlap(module) first")
    if measure:
        modules = [each for record in records for each in record.modules]
        for each in modules:
            if getattr(each.weight, "is_meta", False):
                raise InputError(
                    f"measure=True: {layer_of(each).name} is on the meta device; give the model "
                    "memory (to_empty) and call it first"
                )
        layer_timing.measure([layer_of(each) for each in modules])
    lines: list[str] = []
    for record in records:
        lines += _record(record, measure)
    return Explanation("\n".join(lines))


def _record(record: Overlapped, asked: bool) -> Iterator[str]:
    layers = [layer_of(module) for module in record.modules]
    lost = [left for left in record.left if left.overlappable]
    total = len(layers) + len(lost)
    yield from _head(layers, total)
    yield from _groups(layers)
    reasons: list[str] = []  # said once, below; layers name them by number
    said = [(name, "\n".join(_layer(layer, reasons, asked))) for name, layer in _calls(layers)]
    for names, text in _merged(said):
        yield f"  {names}"
        yield from (f"    {line}" for line in text.split("\n"))
    for number, reason in enumerate(reasons, 1):
        yield f"  [{number}] {reason}"
    if record.left:
        yield "left as they were:"
        entries = [(left.name, f"{left.style}: {left.why}") for left in record.left]
        for names, text in _merged(entries):
            yield f"  {names}"
            yield f"    {text}"


def _head(layers: Sequence[Layer], total: int) -> Iterator[str]:
    """Say how many layers overlap, how many do not, why, and what can be done about it."""
    states = {layer: _state(layer) for layer in layers}
    counts = Counter(states.values())
    one_of = f"{len(layers)} of {total} tensor-parallel layers"
    if counts[OVERLAPS] == len(layers):
        yield f"ficco overlaps {one_of}"
        return
    order = (OVERLAPS, SERIAL, PLAIN, LATER)
    parts = [f"{counts[state]} {state}" for state in order if counts[state]]
    yield f"ficco runs {one_of}: {', '.join(parts)}"
    chosen = [each for each in layers if states[each] == SERIAL and _asked(each) == AUTO]
    found = [choice for each in chosen if (choice := choice_of(each)) is not None]
    unknown = sum(choice.predicted_ms is None for choice in found)
    if unknown:
        yield (
            f"serial: {unknown} could overlap, but nothing is known of what pays on this machine: "
            "the reasons below say how to measure it"
        )
    if len(found) > unknown:
        yield (
            f"serial: {len(found) - unknown} could overlap, but serial is predicted to be fastest "
            "here, for the reasons below; ficco.overlap(model, schedule=NAME) overlaps them all "
            "the same, and ficco.explain(model, measure=True) then times both"
        )


def _asked(layer: Layer) -> str:
    """Return the name of the schedule that a layer was given; AUTO: none."""
    named = layer.options.schedule
    return named.name if isinstance(named, Schedule) else named


def _state(layer: Layer) -> str:
    """Say whether a layer overlaps, as one of four words."""
    try:
        stopped = groups.fallback_reason(layer.ranks.group) is not None
    except InputError:  # torch.distributed has ended
        stopped = True
    if groups.disabled() or stopped or layer.ranks.world == 1:
        return PLAIN
    name = _asked(layer)
    if name == AUTO:
        found = choice_of(layer)
        if found is None:
            return LATER
        name = found.schedule.name
    return SERIAL if name == "serial" else OVERLAPS


def _calls(layers: Iterable[Layer]) -> Iterator[tuple[str, Layer]]:
    """Name every call that layers make: layers that share one are one entry."""
    for layer in layers:
        together = _together(layer)
        if together and together[0] is not layer:
            continue
        parent, dot, name = layer.name.rpartition(".")
        if together:
            name = f"{{{', '.join(each.name.rpartition('.')[2] for each in together)}}}"
        yield parent + dot + name, layer


def _together(layer: Layer) -> list[Layer]:
    """Return the layers that share a call with this one, itself among them; or none."""
    sharing = layer.sharing
    if sharing is None or sharing.why_apart(layer.place):
        return []
    found = [layer_of(module) for module in sharing.members()]
    return found if len(found) > 1 else []


def _groups(layers: Iterable[Layer]) -> Iterator[str]:
    """Say of each group how large it is, and what keeps it from overlapping, if anything."""
    if groups.disabled():
        yield "nothing overlaps: FICCO_DISABLE turns every operator into plain torch.distributed"
    for group, ranks in {layer.ranks.group: layer.ranks for layer in layers}.items():
        try:
            members = torch.distributed.get_process_group_ranks(group)
        except KeyError:
            yield "their group has been destroyed: restore the model, and overlap it with another"
            continue
        yield f"group of {ranks.world} ranks {members}, windows {groups.window_bytes(group)} bytes"
        yield from filter(None, map(said_of, groups.opened(group)))
        if reason := groups.fallback_reason(group):
            yield f"nothing overlaps on its GPUs, which run plain torch.distributed: {reason}"
        if ranks.world == 1:
            yield "nothing is sent in a group of one rank"


def _layer(layer: Layer, reasons: list[str], asked: bool) -> Iterator[str]:
    operator = layer.seen.operator if layer.seen else operator_of(layer)
    if operator == "column_matmul":
        operator += " (backward: matmul_all_reduce)"
    sharing, shared = layer.sharing, bool(_together(layer))
    given = "which read" if sharing is not None and any(sharing.proven) else "if they read"
    more = f", one call for all, {given} the same input" if shared else ""
    yield f"{layer.style} -> {operator}{more}"
    yield _schedule(layer, reasons, asked)
    if sharing is not None and not shared:
        why = sharing.why_apart(layer.place) or "the layers beside it read other inputs"
        yield f"computed alone: {why}"
    elif sharing is not None and sharing.uncounted:
        yield (
            "computed one by one in torch.inference_mode, where nothing says whether a tensor was "
            "written; use torch.no_grad"
        )
    elif sharing is not None and sharing.outside:
        yield f"computed one by one where no forward of {sharing.parent!r} runs, as it was last"
    yield from layer.notes


def _schedule(layer: Layer, reasons: list[str], asked: bool) -> str:
    """Say which schedule runs, and what it gains; `asked`: why that is not measured, too."""
    named, problem, why = layer.options.schedule, problem_of(layer), ""
    if asked and (reason := unmeasured(layer)):
        why = f"; not measured: {reason}"
    if groups.disabled():
        return f"schedule: none (FICCO_DISABLE){why}"
    if named != AUTO:
        name = named.name if isinstance(named, Schedule) else named
        return f"schedule: {name}, as asked{_measured(layer, True)}{why}"
    if layer.seen is None:
        return f"schedule: auto; chosen at the first call, when the number of rows is known{why}"
    if problem is None:
        return f"schedule: auto{why}"
    width = problem.n if problem.flow.sums else sum(layer.seen.widths)
    depth = problem.k // _cut(problem)
    shape = f"{problem.m} x {width} x {depth} {problem.dtype} a rank"
    found = choice_of(layer)
    if found is None:
        return f"schedule: auto, not chosen yet ({shape}){why}"
    one = "one shard in" if found.schedule.taper == "edge" else "with"
    chunks = f" {one} {found.schedule.chunks} chunks" if found.schedule.chunks > 1 else ""
    verb = "measured" if found.by == "book" else "expected"
    serial = [ms for s, ms in found.alternatives if s.name == "serial"]
    gain = ""
    if found.predicted_ms and serial:
        ratio, ms = serial[0] / found.predicted_ms, found.predicted_ms
        gain = f"; {verb} {ratio:.2f}x of serial, {ms:.3f} ms a call"
    gain += _measured(layer, not gain) + why
    reason = "; ".join(found.reasons)
    if reason not in reasons:
        reasons.append(reason)
    number = reasons.index(reason) + 1
    return f"schedule: {found.schedule.name}{chunks} ({shape}), by the {found.by}{gain} [{number}]"


def _measured(layer: Layer, alone: bool) -> str:
    """Say what a layer's last call took when it was timed, if it is that which was.

    Args:
        layer: whose.
        alone: whether no other figure stands before it, whose words need not be said again.
    """
    found = layer.measured.get(layer.seen) if layer.seen else None
    if found is None or layer.seen is None or found.schedule != schedule_of(layer):
        return ""
    where = "here (paced)" if found.paced else "here"
    of = " of serial" if alone else ""
    each = " a forward" if layer.seen.recorded else " a call" if alone else ""
    ratio = found.serial_ms / found.ms
    return f"; measured {where} {ratio:.2f}x{of}, {found.ms:.3f} ms{each}"


def _cut(problem: Problem) -> int:
    """Return into how many parts k is split."""
    return problem.world if problem.depths else 1


def _merged(entries: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Join entries whose texts are equal and whose names differ in their numbers only."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, text in entries:
        found.setdefault((re.sub(r"\d+", "*", name), text), []).append(name)
    for (pattern, text), names in found.items():
        count = f" ({len(names)} layers)" if len(names) > 1 else ""
        yield (pattern if len(names) > 1 else names[0]) + count, text
