"""explain(): what overlap() did to a model, layer by layer, with reasons; as a text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ficco.errors import InputError
from ficco.modules import groups
from ficco.modules.auto import AUTO, choice
from ficco.modules.layers.finding import DTYPES
from ficco.modules.layers.layer import Layer, Seen, layer_of
from ficco.modules.overlapping import RECORD, Overlapped
from ficco.problem import REDUCING, Output, Problem, chunk_sizes
from ficco.schedule import Schedule

__all__ = ["Explanation", "explain"]

Module = torch.nn.Module

_OPERATORS = {
    ("column", True): "all_gather_matmul",
    ("column", False): "column_matmul (backward: matmul_all_reduce)",
    ("row", True): "matmul_reduce_scatter",
    ("row", False): "matmul_all_reduce",
}


class Explanation(str):
    """A text that a Python prompt shows as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def explain(module: Module) -> Explanation:
    """Say what `overlap` did to a model: every tensor-parallel layer, and why.

    For a layer: its style, the operator that runs, the schedule with the selector's reasons, and
    the gain over `serial` that is expected, or was measured where a book says so. Shapes are those
    of the last call; before one, no schedule is chosen. For those that were left as they were: why.
    Layers that differ in a number of their name only, and in nothing that is said, are one entry.

    Raises:
        InputError: nothing in the module is overlapped.
    """
    records = [m.__dict__[RECORD] for m in module.modules() if RECORD in m.__dict__]
    if not records:
        raise InputError("the module is not overlapped; call ficco.overlap(module) first")
    lines: list[str] = []
    for record in records:
        lines += _record(record)
    return Explanation("\n".join(lines))


def _record(record: Overlapped) -> Iterator[str]:
    layers = [layer_of(module) for module in record.modules]
    lost = [left for left in record.left if left.overlappable]
    total = len(layers) + len(lost)
    yield f"ficco overlaps {len(layers)} of {total} tensor-parallel layers"
    yield from _groups(layers)
    reasons: list[str] = []  # said once, below; layers name them by number
    said = [(name, "\n".join(_layer(layer, reasons))) for name, layer in _calls(layers)]
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
    if sharing is None or sharing.alone[layer.place]:
        return []
    pairs = zip(sharing.layers, sharing.alone, strict=True)
    found = [layer_of(module) for module, why in pairs if why is None]
    return found if len(found) > 1 else []


def _groups(layers: Iterable[Layer]) -> Iterator[str]:
    """Say of each group how large it is, and what keeps it from overlapping, if anything."""
    if groups.disabled():
        yield "nothing overlaps: FICCO_DISABLE turns every operator into plain torch.distributed"
    for group, ranks in {layer.ranks.group: layer.ranks for layer in layers}.items():
        members = torch.distributed.get_process_group_ranks(group)
        yield f"group of {ranks.world} ranks {members}, windows {groups.window_bytes(group)} bytes"
        if reason := groups.fallback_reason(group):
            yield f"nothing overlaps on its GPUs, which run plain torch.distributed: {reason}"
        if ranks.world == 1:
            yield "nothing is sent in a group of one rank"


def _layer(layer: Layer, reasons: list[str]) -> Iterator[str]:
    split = layer.gathers if layer.kind == "column" else layer.output_dim is not None
    operator = layer.seen.operator if layer.seen else _OPERATORS[layer.kind, split]
    if operator == "column_matmul":
        operator = _OPERATORS["column", False]
    sharing, shared = layer.sharing, bool(_together(layer))
    given = "which read" if sharing is not None and sharing.proven else "if they read"
    more = f", one call for all, {given} the same input" if shared else ""
    yield f"{layer.style} -> {operator}{more}"
    yield _schedule(layer, reasons)
    if sharing is not None and not shared:
        why = sharing.alone[layer.place] or "the layers beside it read other inputs"
        yield f"computed alone: {why}"
    elif sharing is not None and sharing.uncounted:
        yield (
            "computed one by one in torch.inference_mode, where nothing says whether a tensor was "
            "written; use torch.no_grad"
        )
    yield from layer.notes


def _schedule(layer: Layer, reasons: list[str]) -> str:
    asked, seen = layer.options.schedule, layer.seen
    if groups.disabled():
        return "schedule: none (FICCO_DISABLE)"
    if asked != AUTO:
        name = asked.name if isinstance(asked, Schedule) else asked
        return f"schedule: {name}, as asked"
    if seen is None:
        return "schedule: auto; chosen at the first call, when the number of rows is known"
    problem = _problem(layer, seen)
    if problem is None:
        return "schedule: auto"
    width = problem.n if problem.op in REDUCING else sum(seen.widths)
    depth = problem.k // _cut(problem)
    shape = f"{problem.m} x {width} x {depth} {problem.dtype} a rank"
    runtimes = [r for r in groups.opened(layer.ranks.group) if _serves(r, seen.device)]
    if not runtimes:
        return f"schedule: auto, not chosen yet ({shape})"
    found = choice(problem, runtimes[0], seen.device)
    chunks = f" with {found.schedule.chunks} chunks" if found.schedule.chunks > 1 else ""
    verb = "measured" if found.by == "book" else "expected"
    serial = [ms for s, ms in found.alternatives if s.name == "serial"]
    gain = ""
    if found.predicted_ms and serial:
        ratio, ms = serial[0] / found.predicted_ms, found.predicted_ms
        gain = f"; {verb} {ratio:.2f}x of serial, {ms:.3f} ms a call"
    reason = "; ".join(found.reasons)
    if reason not in reasons:
        reasons.append(reason)
    number = reasons.index(reason) + 1
    return f"schedule: {found.schedule.name}{chunks} ({shape}), by the {found.by}{gain} [{number}]"


def _serves(runtime: Any, device: torch.device) -> bool:
    """Whether a runtime is that for a device: the host engine's for the CPU."""
    on_host: bool = runtime.machine.engine == "host"
    return on_host == (device.type == "cpu")


def _cut(problem: Problem) -> int:
    """Return into how many parts k is split."""
    return problem.world if problem.depths else 1


def _problem(layer: Layer, seen: Seen) -> Problem | None:
    """Return the problem of a layer's last call, as its function poses it to the selector."""
    world, dtype = layer.ranks.world, DTYPES.get(seen.dtype)
    if dtype is None:  # under autocast
        return None
    if seen.operator == "all_gather_matmul":
        outputs = tuple(Output((n,) * world, f"w{i}") for i, n in enumerate(seen.widths))
        return Problem(seen.operator, world, (seen.rows,) * world, seen.k, outputs, dtype)
    if seen.operator == "column_matmul":  # its backward sums dy . w^T
        depths, width = (sum(seen.widths),) * world, seen.k
        operator = "matmul_all_reduce"
    else:
        depths, width, operator = (seen.k,) * world, seen.widths[0], seen.operator
    rows = chunk_sizes(seen.rows, world)
    output = Output((width,) * world)
    return Problem(operator, world, rows, sum(depths), (output,), dtype, depths=depths)


def _merged(entries: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Join entries whose texts are equal and whose names differ in their numbers only."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, text in entries:
        found.setdefault((re.sub(r"\d+", "*", name), text), []).append(name)
    for (pattern, text), names in found.items():
        count = f" ({len(names)} layers)" if len(names) > 1 else ""
        yield (pattern if len(names) > 1 else names[0]) + count, text
