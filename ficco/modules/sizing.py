"""size_windows(): windows made large enough before a CUDA graph is captured, or before serving.

Windows grow with the largest call, which a capture forbids and a request should not wait for; nor
should it wait for kernels, of which another number of rows may need others. What a call needs
follows from its plan alone, so the layers' own calls are made once, on zeros.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ficco.checking import whole_number
from ficco.engines.available_memory import LOOKED_AT, check_on
from ficco.engines.group_kernels import GroupKernels
from ficco.errors import InputError
from ficco.kernels import pack
from ficco.modules import groups
from ficco.modules.auto import AUTO
from ficco.modules.layers.choosing import choice_of, problem_of, runtime_of, schedule_of
from ficco.modules.layers.finding import DTYPES, local_of
from ficco.modules.layers.layer import ATTRIBUTE, Layer, Seen, layer_of
from ficco.modules.layers.sample_call import call, operator_of
from ficco.problem import MOST, Problem
from ficco.schedule import Schedule

__all__ = ["size_windows"]

_NEAR = 1.3  # times as long as the best: what may be the best with other rows
_FEWER = 0.8  # of rows, from one size that is made ready for serving to the next
Module = torch.nn.Module
Tensor = torch.Tensor
_Kind = tuple[Layer, list[Tensor], bool]  # of calls: the layer, its weights, whether backward runs


def size_windows(module: Module, rows: int, *, backward: bool | None = None) -> None:
    """Run every kind of call that an overlapped model's layers make, several times, on zeros.

    Afterwards no call with as many rows or fewer, by the same schedule, grows a window; on GPUs
    neither does the same call in a capture. Without backward, calls of fewer rows are made as well,
    each of a fifth fewer, so that nearly all kernels are loaded that requests of other lengths run;
    those that launch what others have loaded are left out. What the pack lacks is compiled at once,
    in several processes, but for kernels of backward. It is a collective call: all ranks make it
    alike. Gradients of the model are not touched.

    Args:
        module: an overlapped model.
        rows: batch x sequence, over all ranks, of the largest input to come.
        backward: whether to run backward, too; None: where the model trains and has a weight that
            requires a gradient.

    Raises:
        InputError: `rows` is no size, or more than memory holds; the model is not overlapped, is on
            the meta device, or its weights are not those that its layers multiply (sharded by FSDP
            at the moment).
    """
    if not isinstance(module, Module):
        raise InputError(f"module: {type(module).__name__} found; pass a torch.nn.Module")
    found = [m for m in module.modules() if ATTRIBUTE in m.__dict__]
    if not found:
        raise InputError("the module is not overlapped; call ficco.overlap(module) first")
    rows = whole_number(rows, "rows (batch x sequence)", 1, MOST)
    calls = list(_kinds(found, backward))
    for layer, weights, _ in calls:
        _check_memory(layer, weights, rows)
    with pack.keeping_blocks(), _compiling(calls):
        _compile_together(calls, rows)
        for layer, weights, wanted in calls:  # windows grow, which lets go what was made ready
            _call(layer, weights, rows, wanted)
        for layer, weights, wanted in calls:
            if not wanted:
                _fewer(layer, weights, rows)
        for layer, weights, wanted in calls * 2:  # the second time is for what a capture takes
            _call(layer, weights, rows, wanted)


def _kinds(found: Sequence[Module], backward: bool | None) -> Iterator[_Kind]:
    """Yield every kind of call: its layer, the weights that share it, whether to run backward."""
    done = set()
    for each in found:
        layer = layer_of(each)
        together = [each]
        if layer.sharing is not None and not layer.sharing.why_apart(layer.place):
            together = layer.sharing.members()
        weights = [local_of(other.weight) for other in together]
        first = weights[0]
        mesh = getattr(each.weight, "device_mesh", None)
        if mesh is not None and mesh.ndim != 1:
            raise InputError(
                f"{layer.name}: its weight is split over a mesh of {mesh.ndim} dimensions at the "
                "moment (by FSDP?); size the windows before it is, or by a step of the model"
            )
        if first.is_meta or first.dtype not in DTYPES or first.dim() != 2:
            raise InputError(f"{layer.name}: its weight is {first.dtype} on {first.device}")
        kind = (layer.kind, layer.input_dim, layer.output_dim, layer.ranks.group, first.dtype,
                first.device, layer.options, *(weight.shape for weight in weights))  # fmt: skip
        if kind in done:
            continue
        done.add(kind)
        wanted = backward
        if wanted is None:
            wanted = each.training and any(weight.requires_grad for weight in weights)
        yield layer, weights, wanted


def _check_memory(layer: Layer, weights: Sequence[Tensor], rows: int) -> None:
    """Refuse a call whose input and results alone are larger than the memory of their device."""
    seen = _posed(layer, weights, rows).seen
    if seen is None or not weights:
        return
    high = seen.rows if seen.operator == "column_matmul" else rows
    if seen.operator == "matmul_reduce_scatter":
        high = rows // layer.ranks.world
    need = (seen.rows * seen.k + high * sum(seen.widths)) * seen.dtype.itemsize
    if seen.device.type == "cuda":
        have = torch.cuda.get_device_properties(seen.device).total_memory
    else:
        have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > have:
        raise InputError(
            f"rows={rows}: {layer.name} would read and make {need / 2**30:.0f} GiB on each rank, "
            f"and {seen.device} has {have / 2**30:.0f} GiB; ask for fewer rows, those of the "
            "largest input to come"
        )


@contextlib.contextmanager
def _compiling(calls: Sequence[_Kind]) -> Iterator[None]:
    """Open the layers' groups for GPUs; let "auto" compile at once what the pack lacks."""
    opened = []
    for layer, weights, _ in calls:
        if weights and weights[0].device.type == "cuda" and not groups.disabled():
            with torch.cuda.device(weights[0].device):
                runtime = groups.gpu_runtime(layer.ranks.group, weights[0].device)
            if runtime is not None and runtime.kernels is not None:
                opened.append(runtime.kernels)
    try:
        for kernels in opened:
            kernels.at_once = True
        yield
    finally:
        for kernels in opened:
            kernels.at_once = False


def _compile_together(calls: Sequence[_Kind], rows: int) -> None:
    """Compile at once what the pack lacks of the kernels that calls launch, but for backward's."""
    wanted: dict[GroupKernels, list[tuple[Problem, Schedule]]] = {}
    for layer, weights, backward in calls:
        for fewer in (rows,) if backward else (rows, *_heights(rows)):
            posed = _posed(layer, weights, fewer)
            asked = _asked(posed)
            if asked is None or not asked[0].compiles:
                continue
            own, problem = asked
            taken = [_taken(posed, "eager"), *_gated(posed)]
            taken += [_taken(posed, "captured")] if fewer == rows else []
            wanted.setdefault(own, []).extend((problem, each) for each in taken if each)
    for own, them in wanted.items():
        own.compile(them)


def _posed(layer: Layer, weights: Sequence[Tensor], rows: int) -> Layer:
    """Return a copy of a layer that has seen the call which `_call` would make."""
    if not weights:
        return layer
    operator, world, first = operator_of(layer), layer.ranks.world, weights[0]
    whole, dtype, device = -(-rows // world) * world, first.dtype, first.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    mine = whole // world if operator == "all_gather_matmul" else whole
    widths = tuple([weight.shape[0] for weight in weights])
    seen = Seen(operator, mine, first.shape[1], widths, dtype, device, whole, 1, False)
    return replace(layer, seen=seen)


def _taken(layer: Layer, when: str) -> Schedule | None:
    """Return the schedule of a layer's last call in a regime."""
    if layer.options.schedule != AUTO:
        return schedule_of(layer)
    found = choice_of(layer, when)
    return None if found is None else found.schedule


def _asked(layer: Layer) -> tuple[GroupKernels, Problem] | None:
    """Return what the group of a layer's call has of ficco's own kernels, and the problem.

    None: no GPUs run it, or none of these kernels.
    """
    if layer.seen is None or layer.seen.device.type != "cuda":
        return None
    own, problem = getattr(runtime_of(layer), "kernels", None), problem_of(layer)
    return None if own is None or problem is None else (own, problem)


def _heights(rows: int) -> Iterator[int]:
    """Yield fewer and fewer rows, to one."""
    fewer = rows
    while fewer := int(fewer * _FEWER):
        yield fewer


def _fewer(layer: Layer, weights: list[Tensor], rows: int) -> None:
    """Make a layer's call of fewer and fewer rows, to one, where it may need other kernels."""
    loaded: set[Any] = set()
    for fewer in _heights(rows):
        posed = _posed(layer, weights, fewer)
        asked = _asked(posed)
        taken = None if asked is None else _taken(posed, "eager")
        if asked is None or taken is None:
            _call(layer, weights, fewer, backward=False)
            continue
        own, problem = asked
        for schedule in (taken, *_gated(posed)):
            launched = own.launched(problem, schedule)
            if launched is not None and launched <= loaded:
                continue
            loaded |= launched or set()
            by = layer.options.schedule if schedule == taken else schedule
            options = replace(layer.options, schedule=by)
            _call(replace(layer, options=options), weights, fewer, backward=False)


def _gated(layer: Layer) -> list[Schedule]:
    """Return the schedules of gated launches that a few rows more or less may make the best one.

    One of each kind of sums, which have kernels of their own, but for that of the layer's call on a
    GPU: a kernel takes a second to compile.
    """
    if layer.options.schedule != AUTO or layer.seen is None or layer.seen.device.type != "cuda":
        return []
    found = choice_of(layer)
    if found is None or found.predicted_ms is None:
        return []
    taken = found.schedule.sums if found.schedule.compute == "gated" else ""
    asked = _asked(layer)

    def has(schedule: Schedule) -> bool:
        return asked is None or asked[0].compiles or asked[0].has(asked[1], schedule)

    most, near = _NEAR * found.predicted_ms, dict[str, Schedule]()
    for schedule, ms in found.alternatives:
        if schedule.compute == "gated" and ms < most and schedule.sums != taken and has(schedule):
            near.setdefault(schedule.sums, schedule)
    return list(near.values())


def _call(layer: Layer, weights: list[Tensor], rows: int, backward: bool) -> Layer:
    """Call a copy of a layer on zeros; return the copy, which has seen the call."""
    world, first, operator = layer.ranks.world, weights[0].detach(), operator_of(layer)
    split = operator == "all_gather_matmul"
    mine = -(-rows // world) if split else -(-rows // world) * world
    each = 2 if backward else 1  # data, and its gradient
    width = sum([weight.shape[0] for weight in weights])
    elements = mine * first.shape[1] + (mine * world if split else mine) * width
    need = each * elements * first.element_size()
    if need >= LOOKED_AT:
        check_on(first.device, need, f"a call of {layer.name} with {rows} rows")
    x = first.new_zeros((mine, first.shape[1]), requires_grad=backward)
    given = [weight.detach().requires_grad_(backward) for weight in weights]
    with torch.set_grad_enabled(backward):
        called = replace(layer)
        ys = call(called, operator, x, given)
        if backward:
            torch.autograd.grad(ys, [x, *given], [torch.zeros_like(y) for y in ys])
    return called
