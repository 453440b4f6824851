"""size_windows(): windows made large enough before a CUDA graph is captured, or before serving.

Windows grow with the largest call, which a capture forbids and a request should not wait for; nor
should it wait for kernels, of which another number of rows may need others. What a call needs
follows from its plan alone, so the layers' own calls are made once, on zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from numbers import Integral

import torch
import torch.distributed as dist

from ficco.engines.wanted import DescribedKernels, missing
from ficco.errors import InputError
from ficco.kernels import fallback
from ficco.kernels.arrays import library_of
from ficco.kernels.variants import Variant
from ficco.lowering import lower_rank
from ficco.modules.auto import AUTO
from ficco.modules.layers.choosing import choice_of, problem_of
from ficco.modules.layers.finding import DTYPES, local_of
from ficco.modules.layers.layer import ATTRIBUTE, Layer, layer_of
from ficco.modules.layers.trial import call, operator_of
from ficco.schedule import Schedule

__all__ = ["size_windows"]

_NEAR = 1.3  # times as long as the best: what may be the best with other rows
_FEWER = 0.8  # of rows, from one size that is made ready for serving to the next
Module = torch.nn.Module
Tensor = torch.Tensor


def size_windows(module: Module, rows: int, *, backward: bool | None = None) -> None:
    """Run every kind of call that an overlapped model's layers make, several times, on zeros.

    Afterwards no call with as many rows or fewer, by the same schedule, grows a window; on GPUs
    neither does the same call in a capture. Without backward, calls of fewer rows are made as well,
    each of a fifth fewer, so that nearly all kernels are loaded that requests of other lengths run;
    what the pack lacks of them is compiled at once, in several processes. It is a collective call:
    all ranks make it alike. Gradients of the model are not touched.

    Args:
        module: an overlapped model.
        rows: batch x sequence, over all ranks, of the largest input to come.
        backward: whether to run backward, too; None: where the model trains and has a weight that
            requires a gradient.

    Raises:
        InputError: the model is not overlapped, is on the meta device, or its weights are not those
            that its layers multiply (sharded by FSDP at the moment).
    """
    found = [m for m in module.modules() if ATTRIBUTE in m.__dict__]
    if not found:
        raise InputError("the module is not overlapped; call ficco.overlap(module) first")
    if not isinstance(rows, Integral) or rows < 1:
        raise InputError(f"rows={rows!r}: it is batch x sequence, a whole number of 1 or more")
    calls = list(_kinds(found, backward))
    # Windows grow, which lets go what was made ready.
    called = [_call(layer, weights, rows, wanted) for layer, weights, wanted in calls]
    _compile_together(
        [each for each, (*_, wanted) in zip(called, calls, strict=True) if not wanted], rows
    )
    for layer, weights, wanted in calls:
        if not wanted:
            _fewer(layer, weights, rows)
    for layer, weights, wanted in calls * 2:  # the second time makes ready what a capture takes
        _call(layer, weights, rows, wanted)


def _kinds(
    found: Sequence[Module], backward: bool | None
) -> Iterator[tuple[Layer, list[Tensor], bool]]:
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


def _compile_together(called: Sequence[Layer], rows: int) -> None:
    """Compile at once what the pack lacks of the kernels that calls of fewer rows launch.

    Without GPUs, or where nothing can be compiled, nothing is done.
    """
    on_gpus = [each for each in called if each.seen and each.seen.device.type == "cuda"]
    if not on_gpus or fallback.why_not():
        return
    arrays = library_of(on_gpus[0].seen.device)  # type: ignore[union-attr]
    kernels = DescribedKernels(arrays.capability, arrays.processors or 1)
    wanted: dict[Variant, None] = {}
    for layer, fewer in product(on_gpus, _heights(rows)):
        assert layer.seen is not None
        smaller = replace(layer, seen=layer.seen._replace(whole=fewer))
        problem, found = problem_of(smaller), choice_of(smaller)
        if problem is None or found is None or found.schedule.transport == "collective":
            continue
        plan = lower_rank(problem, found.schedule, dist.get_rank(layer.ranks.group))
        wanted |= dict.fromkeys(missing(plan, kernels))
    fallback.compile_together(wanted, arrays.capability)


def _heights(rows: int) -> Iterator[int]:
    """Yield fewer and fewer rows, to one."""
    fewer = rows
    while fewer := int(fewer * _FEWER):
        yield fewer


def _fewer(layer: Layer, weights: list[Tensor], rows: int) -> None:
    """Make a layer's call of fewer and fewer rows, to one."""
    for fewer in _heights(rows):
        called = _call(layer, weights, fewer, backward=False)
        for other in _gated(called):
            options = replace(layer.options, schedule=other)
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
    most, near = _NEAR * found.predicted_ms, dict[str, Schedule]()
    for schedule, ms in found.alternatives:
        if schedule.compute == "gated" and ms < most and schedule.sums != taken:
            near.setdefault(schedule.sums, schedule)
    return list(near.values())


def _call(layer: Layer, weights: list[Tensor], rows: int, backward: bool) -> Layer:
    """Call a copy of a layer on zeros; return the copy, which has seen the call."""
    world, first, operator = layer.ranks.world, weights[0].detach(), operator_of(layer)
    split = operator == "all_gather_matmul"
    mine = -(-rows // world) if split else -(-rows // world) * world
    x = first.new_zeros((mine, first.shape[1]), requires_grad=backward)
    given = [weight.detach().requires_grad_(backward) for weight in weights]
    with torch.set_grad_enabled(backward):
        called = replace(layer)
        ys = call(called, operator, x, given)
        if backward:
            torch.autograd.grad(ys, [x, *given], [torch.zeros_like(y) for y in ys])
    return called
