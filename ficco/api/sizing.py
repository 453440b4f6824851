"""reserve() and limit_windows(): allocate windows before they are needed, and limit their bytes.

Windows grow to the largest call. A capture forbids that, and a request should not wait for it, nor
for kernels, which may differ with the number of rows. A call's needs depend only on its plan, so
each of the layers' calls is made once, on zeros.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ficco.api import groups
from ficco.api.arguments import process_group
from ficco.api.auto import AUTO, regime
from ficco.api.layers import experts
from ficco.api.layers.choosing import choice_of, problem_of, runtime_of, schedule_of
from ficco.api.layers.experts import weights_of
from ficco.api.layers.experts_on_zeros import Mixture, mixtures_of
from ficco.api.layers.finding import local_of
from ficco.api.layers.layer import ATTRIBUTE, Layer, Seen, layer_of
from ficco.core.checking import true_or_false, whole_number
from ficco.core.errors import InputError
from ficco.engine.available_memory import LOOKED_AT, check_on
from ficco.engine.compute.torch_dtypes import PROBLEM_NAME_OF
from ficco.engine.group_kernels import GroupKernels
from ficco.kernels import pack
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import MOST
from ficco.plan.schedule import Schedule

_NEAR_BEST = 1.3  # times the best duration: such a schedule may be the best for other rows
_ROW_STEP = 0.8  # ratio of the rows of one call prepared for serving to the previous one
Module = torch.nn.Module
Tensor = torch.Tensor
_Kind = tuple[Layer, list[Tensor], bool]  # a kind of call: layer, weights, whether backward runs


def reserve(module: Module, tokens: int, *, backward: bool | None = None) -> int:
    """Run every kind of call that an overlapped model's layers make, several times, on zeros.

    Afterwards no call with `tokens` rows or fewer and the same schedule grows a window, also in a
    capture; of experts if ranks have equally many tokens. Without backward, calls with fewer rows
    follow, each with a fifth fewer than the last, to load nearly all kernels that requests of other
    lengths need; calls whose kernels are loaded already are skipped. Kernels that the pack lacks
    are compiled first, in several processes, except those of backward and of experts. It is a
    collective call: all ranks pass equal arguments. Gradients of the model do not change.

    Args:
        module: an overlapped model.
        tokens: batch x sequence, over all ranks, of the largest future input.
        backward: whether to run backward too; None: if the model is in training mode and has a
            weight that requires a gradient.

    Returns:
        Bytes of this rank's windows in the groups of the model's layers. A server that divides the
        memory of its GPU subtracts them. `limit_windows` bounds them.

    Raises:
        InputError: `tokens` is not a size, or too large for the memory; the model is not
            overlapped, is on the meta device, or its weights are currently not the ones that its
            layers multiply (sharded by FSDP); a CUDA graph is captured.
        EngineError: a call failed on some rank; `ficco.reset` makes the group usable again.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8)).eval()
        >>> model = ficco.overlap(model, plan={"0": "rowwise"})
        >>> ficco.reserve(model, tokens=4 * 128)  # 4 sequences of at most 128 tokens
        0
        >>> with torch.no_grad():
        ...     model(torch.randn(512, 8)).shape  # no window grows from here on
        torch.Size([512, 8])
    """
    if not isinstance(module, Module):
        raise InputError(f"module: {type(module).__name__} found; pass a torch.nn.Module")
    overlapped = [m for m in module.modules() if ATTRIBUTE in m.__dict__]
    if not overlapped and not any(map(experts.is_overlapped, module.modules())):
        raise InputError("the module is not overlapped; call ficco.overlap(module) first")
    rows = whole_number(tokens, "tokens (batch x sequence)", 1, MOST)
    if regime() == "captured":
        raise InputError("reserve: a CUDA graph is being captured; call ficco.reserve before it")
    if backward is not None:
        true_or_false(backward, "backward")
    calls = list(_kinds(overlapped, backward))
    mixtures = list(mixtures_of(module, backward))
    for layer, weights, _ in calls:
        _check_memory(layer, weights, rows)
    for mixture in mixtures:
        device = weights_of(mixture.experts.module)[0].device
        _check_fits(mixture.experts.name, mixture.bytes_of_call(rows), device, rows)
    with pack.keeping_blocks(), _compiling(calls):
        _compile_together(calls, rows)
        for layer, weights, runs_backward in calls:  # first: growing windows drops bound programs
            _call(layer, weights, rows, runs_backward)
        for mixture in mixtures:
            mixture.call(rows)
        for layer, weights, runs_backward in calls:
            if not runs_backward:
                _call_smaller(layer, weights, rows)
        for layer, weights, runs_backward in calls * 2:  # the second call loads a capture's kernels
            _call(layer, weights, rows, runs_backward)
        for mixture in mixtures:
            for fewer in () if mixture.backward else _smaller_rows(rows):
                mixture.call(fewer)
            mixture.call(rows)
    return _bytes_of(calls, mixtures)


@groups.collective
def limit_windows(limit: int | None, group: Any = None) -> None:
    """Limit the bytes of a rank's windows and mailboxes in a group, those of graphs included.

    It holds within 2 KiB, for the CPU and for GPUs separately, and stays after `close`. While
    `tune` measures, a second set of windows may have as many bytes.

    A call that needs more runs `serial`, on all ranks alike, and the log says so once. All ranks
    pass the same limit; on an open group it is a collective call. The environment variable
    FICCO_WINDOW_BYTES is the limit of groups without one.

    Args:
        limit: bytes; None: no limit but the memory, whatever the variable says.
        group: a ProcessGroup or a DeviceMesh of one dimension; None: all ranks.

    Raises:
        InputError: `limit` is not a size, differs between ranks, or the windows are larger already.
        EngineError: the group opens later, and a rank has another limit.

    Example:
        >>> ficco.limit_windows(64 << 20)  # 64 MiB on every rank
        >>> y = ficco.matmul_all_reduce(torch.ones(4, 2), torch.ones(2, 3))
        >>> ficco.limit_windows(None)
    """
    if limit is not None:
        limit = whole_number(limit, "limit (bytes of a rank's windows)", 0)
    pg = process_group(group)
    for open_runtime in groups.opened(pg):
        open_runtime.check_limit(limit)
    for open_runtime in groups.opened(pg):
        open_runtime.window_limit = limit
    groups.limits[pg] = limit
    groups.forget_calls()


def _kinds(overlapped: Sequence[Module], backward: bool | None) -> Iterator[_Kind]:
    """Yield every kind of call: its layer, the weights that share it, whether to run backward."""
    done = set()
    for module in overlapped:
        layer = layer_of(module)
        together = [module]
        if layer.sharing is not None and not layer.sharing.why_apart(layer.place):
            together = layer.sharing.members()
        weights = [local_of(other.weight) for other in together]
        first = weights[0]
        mesh = getattr(module.weight, "device_mesh", None)
        if mesh is not None and mesh.ndim != 1:
            raise InputError(
                f"{layer.name}: its weight is currently split over a mesh of {mesh.ndim} "
                "dimensions (by FSDP?); size the windows before that, or run a step of the model"
            )
        if first.is_meta or first.dtype not in PROBLEM_NAME_OF or first.dim() != 2:
            raise InputError(f"{layer.name}: its weight is {first.dtype} on {first.device}")
        kind = (layer.kind, layer.input_dim, layer.output_dim, layer.ranks.group, first.dtype,
                first.device, layer.options, *(weight.shape for weight in weights))  # fmt: skip
        if kind in done:
            continue
        done.add(kind)
        runs_backward = backward
        if runs_backward is None:
            runs_backward = module.training and any(weight.requires_grad for weight in weights)
        yield layer, weights, runs_backward


def _bytes_of(calls: Sequence[_Kind], mixtures: Sequence[Mixture]) -> int:
    """Return the bytes of this rank's windows in the groups of the calls."""
    ranks = {layer.ranks.group: layer.ranks.world for layer, _, _ in calls}
    ranks |= {mixture.group: mixture.world for mixture in mixtures}
    return sum([groups.window_bytes(group) // world for group, world in ranks.items()])


def _check_memory(layer: Layer, weights: Sequence[Tensor], rows: int) -> None:
    """Refuse a call whose input and results are larger than the memory of their device."""
    seen = _with_call(layer, weights, rows).seen
    if seen is None or not weights:
        return
    high = seen.rows if seen.operator == "column_matmul" else rows
    if seen.operator == "matmul_reduce_scatter":
        high = rows // layer.ranks.world
    need = (seen.rows * seen.k + high * sum(seen.widths)) * seen.dtype.itemsize
    _check_fits(layer.name, need, seen.device, rows)


def _check_fits(name: str, need: int, device: torch.device, rows: int) -> None:
    """Refuse a call that needs more bytes than a device has."""
    if device.type == "cuda":
        have = torch.cuda.get_device_properties(device).total_memory
    else:
        have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > have:
        raise InputError(
            f"tokens={rows}: {name} would read and write {need / 2**30:.0f} GiB on each "
            f"rank, but {device} has {have / 2**30:.0f} GiB; pass fewer, those of the largest "
            "future input"
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
    """Compile at once all kernels of the calls that the pack lacks, except those of backward."""
    wanted: dict[GroupKernels, list[tuple[Problem, Schedule]]] = {}
    for layer, weights, backward in calls:
        for fewer in (rows,) if backward else (rows, *_smaller_rows(rows)):
            posed = _with_call(layer, weights, fewer)
            found = _kernels_and_problem(posed)
            if found is None or not found[0].compiles:
                continue
            kernels, problem = found
            schedules = [_chosen_schedule(posed, "eager"), *_gated_alternatives(posed)]
            schedules += [_chosen_schedule(posed, "captured")] if fewer == rows else []
            wanted.setdefault(kernels, []).extend((problem, s) for s in schedules if s)
    for kernels, pairs in wanted.items():
        kernels.compile(pairs)


def _with_call(layer: Layer, weights: Sequence[Tensor], rows: int) -> Layer:
    """Return a copy of a layer whose last call is the one that `_call` would make."""
    if not weights:
        return layer
    operator, world, first = layer.operator, layer.ranks.world, weights[0]
    whole, dtype, device = -(-rows // world) * world, first.dtype, first.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    own_rows = whole // world if operator == "all_gather_matmul" else whole
    widths = tuple([weight.shape[0] for weight in weights])
    seen = Seen(operator, own_rows, first.shape[1], widths, dtype, device, whole, 1, False)
    return replace(layer, seen=seen)


def _chosen_schedule(layer: Layer, when: str) -> Schedule | None:
    """Return the schedule of a layer's last call in a regime."""
    if layer.options.schedule != AUTO:
        return schedule_of(layer)
    choice = choice_of(layer, when)
    return None if choice is None else choice.schedule


def _kernels_and_problem(layer: Layer) -> tuple[GroupKernels, Problem] | None:
    """Return the kernels that the group of a layer's call can load, and the call's problem.

    None: the call does not run on GPUs, or without ficco's own kernels.
    """
    if layer.seen is None or layer.seen.device.type != "cuda":
        return None
    kernels, problem = getattr(runtime_of(layer), "kernels", None), problem_of(layer)
    return None if kernels is None or problem is None else (kernels, problem)


def _smaller_rows(rows: int) -> Iterator[int]:
    """Yield decreasing numbers of rows, down to 1."""
    fewer = rows
    while fewer := int(fewer * _ROW_STEP):
        yield fewer


def _call_smaller(layer: Layer, weights: list[Tensor], rows: int) -> None:
    """Make a layer's call with fewer and fewer rows, down to 1, if it may need other kernels."""
    loaded: set[Any] = set()
    for fewer in _smaller_rows(rows):
        posed = _with_call(layer, weights, fewer)
        found = _kernels_and_problem(posed)
        chosen = None if found is None else _chosen_schedule(posed, "eager")
        if found is None or chosen is None:
            _call(layer, weights, fewer, backward=False)
            continue
        kernels, problem = found
        for schedule in (chosen, *_gated_alternatives(posed)):
            launched = kernels.launched(problem, schedule)
            if launched is not None and launched <= loaded:
                continue
            loaded |= launched or set()
            option = layer.options.schedule if schedule == chosen else schedule
            options = replace(layer.options, schedule=option)
            _call(replace(layer, options=options), weights, fewer, backward=False)


def _gated_alternatives(layer: Layer) -> list[Schedule]:
    """Return gated schedules that may be the best for slightly more or fewer rows.

    On a GPU only, one schedule per kind of sums, because each kind has its own kernels, which take
    a second to compile. The kind of the layer's own schedule is left out.
    """
    if layer.options.schedule != AUTO or layer.seen is None or layer.seen.device.type != "cuda":
        return []
    choice = choice_of(layer)
    if choice is None or choice.predicted_ms is None:
        return []
    own_sums = choice.schedule.sums if choice.schedule.compute == "gated" else ""
    found = _kernels_and_problem(layer)

    def has(schedule: Schedule) -> bool:
        return found is None or found[0].compiles or found[0].has(found[1], schedule)

    most, near = _NEAR_BEST * choice.predicted_ms, dict[str, Schedule]()
    for schedule, ms in choice.alternatives:
        if schedule.compute != "gated" or schedule.sums == own_sums:
            continue
        if ms < most and has(schedule):
            near.setdefault(schedule.sums, schedule)
    return list(near.values())


def _call(layer: Layer, weights: list[Tensor], rows: int, backward: bool) -> Layer:
    """Call a copy of a layer on zeros; return the copy, which records the call."""
    world, first, operator = layer.ranks.world, weights[0].detach(), layer.operator
    split = operator == "all_gather_matmul"
    own_rows = -(-rows // world) if split else -(-rows // world) * world
    copies = 2 if backward else 1  # data, and its gradient
    width = sum([weight.shape[0] for weight in weights])
    elements = own_rows * first.shape[1] + (own_rows * world if split else own_rows) * width
    need = copies * elements * first.element_size()
    if need >= LOOKED_AT:
        check_on(first.device, need, f"a call of {layer.name} with {rows} rows")
    x = first.new_zeros((own_rows, first.shape[1]), requires_grad=backward)
    detached = [weight.detach().requires_grad_(backward) for weight in weights]
    with torch.set_grad_enabled(backward):
        called = replace(layer)
        ys = called.call(operator, x, detached)
        if backward:
            torch.autograd.grad(ys, [x, *detached], [torch.zeros_like(y) for y in ys])
    return called
