"""What the calls that a model's layers made take here, beside the same calls by `serial`.

Every kind of call is made on data of its own, as often on all ranks, so that all come to the same
figures. Kinds that cannot or need not be timed are told by `unmeasured`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ficco.errors import InputError
from ficco.modules import groups
from ficco.modules.layers.choosing import runtime_of, schedule_of
from ficco.modules.layers.finding import DTYPES
from ficco.modules.layers.layer import Layer, Measured, Seen
from ficco.modules.layers.sample_call import call

__all__ = ["measure", "unmeasured"]

BUDGET_S = 0.25  # for the rounds of one kind of call
LEAST, MOST = 5, 25  # rounds; in each both schedules have a turn
TURN_S, QUEUED = 0.005, 20  # what a turn should last at least, and the most calls in it
WARM = 3  # calls that are not timed: the second of a shape may make ready what captures need

Tensor = torch.Tensor


def measure(layers: Sequence[Layer]) -> None:
    """Time the forward of every kind of call that layers made last; figures stay with the layers.

    A collective call: all ranks of the layers' groups make it with the same layers.

    Raises:
        InputError: a CUDA graph is being captured, or ranks of a group made different calls.
        MemoryError: some rank had no memory for the data of a call.
    """
    gpus: Any = torch.cuda
    if gpus.is_initialized() and gpus.is_current_stream_capturing():
        raise InputError(
            "measure=True while a CUDA graph is captured, which would take the timed calls in; "
            "call ficco.explain(module, measure=True) before or after the capture"
        )
    by_group: dict[Any, list[Layer]] = {}
    for layer in layers:
        by_group.setdefault(layer.ranks.group, []).append(layer)
    for group, members in by_group.items():
        for same in _kinds(group, members):
            seen, schedule = same[0].seen, schedule_of(same[0])
            if seen is not None and schedule is not None:
                paced = runtime_of(same[0]).machine.paced
                found = Measured(schedule, *_times(same[0], seen), paced)
                for layer in same:
                    layer.measured[seen] = found


def unmeasured(layer: Layer) -> str | None:
    """Say why a layer's last call is not timed; None: it is."""
    return next(_reasons(layer), None)


def _reasons(layer: Layer) -> Iterator[str]:
    """Say what keeps a layer's last call from being timed, the plainest first."""
    seen = layer.seen
    if groups.disabled():
        yield "FICCO_DISABLE turns it into plain torch.distributed"
    if layer.ranks.world == 1:
        yield "nothing is sent in a group of one rank"
    if seen is None:
        yield "no call was seen (within torch.compile none is); call the model first"
        return
    if seen.device.type == "cuda" and groups.fallback_reason(layer.ranks.group):
        yield "its GPUs run plain torch.distributed"
    if seen.operator == "column_matmul":
        yield "its forward sends nothing"
    if seen.dtype not in DTYPES or 0 in (seen.whole, seen.inner, seen.k, *seen.widths):
        yield f"its last call had nothing to multiply, or {seen.dtype}"
    if runtime_of(layer) is None:
        yield "its group was closed after its last call; call the model again"
    schedule = schedule_of(layer)
    if schedule is None or schedule.compute == "whole" or schedule.transport == "collective":
        yield "it runs serial"


def _kinds(group: Any, layers: Sequence[Layer]) -> list[list[Layer]]:
    """Return the layers that are timed, those with equal calls on every rank together.

    Raises:
        InputError: ranks disagree; on all of them.
    """
    reasons = [unmeasured(layer) for layer in layers]
    mine = [_facts(layer, why) for layer, why in zip(layers, reasons, strict=True)]
    seen = next((layer.seen for layer in layers if layer.seen), None)
    device = torch.device("cpu") if seen is None else seen.device
    with _device_of(seen):
        told = groups.gathered(group, device, mine)
    counts = [len(theirs) for theirs in told]
    if len(set(counts)) > 1:
        raise InputError(
            f"measure=True: the ranks of a group pass {counts} of its layers; pass the same part "
            "of the model on all of them"
        )
    kinds: dict[Any, list[Layer]] = {}
    for layer, why, calls in zip(layers, reasons, zip(*told, strict=True), strict=True):
        for rank, theirs in enumerate(calls):
            if theirs[:2] != calls[0][:2]:
                raise InputError(
                    f"measure=True: rank 0 of a group has {' '.join(calls[0][:2])}; rank {rank} "
                    f"has {' '.join(theirs[:2])}; call the model alike on all ranks before"
                )
        if why is None:
            key = layer.options, tuple(theirs[1:] for theirs in calls)
            kinds.setdefault(key, []).append(layer)
    return list(kinds.values())


def _facts(layer: Layer, why: str | None) -> tuple[str, str, tuple[Any, ...]]:
    """Return a layer's name, what its last call has alike on all ranks, and what is this rank's."""
    seen, schedule = layer.seen, None if why is not None else schedule_of(layer)
    if seen is None or schedule is None:
        return layer.name, f"that is not timed, since {why}", ()
    size = f"k={seen.k}" if seen.operator == "all_gather_matmul" else f"n={seen.widths[0]}"
    alike = (
        f"called as {seen.operator} with {seen.whole} x {seen.inner} rows, {size}, {seen.dtype} on "
        f"{seen.device.type}, {schedule.name} with grain {schedule.grain_text}, "
        f"{'with' if seen.recorded else 'without'} gradients"
    )
    return layer.name, alike, (seen.k, seen.widths)


def _times(layer: Layer, seen: Seen) -> tuple[float, float]:
    """Return the milliseconds of a call by the layer's own schedule, and by serial."""
    plain = replace(layer, options=replace(layer.options, schedule="serial"))
    group, device = layer.ranks.group, seen.device
    with _modes(seen):
        x, weights = _data(layer, seen)
        ways = [_way(each, seen, x, weights) for each in (replace(layer), plain)]
        for way in ways * WARM:
            way()
        rough = _slowest(group, device, [_turn(way, 1, group, device) for way in ways])
        calls = min(max(int(TURN_S / max(rough)), 1), QUEUED)
        rounds = min(max(int(BUDGET_S / (calls * sum(rough))), LEAST), MOST)
        taken = [_turn(way, calls, group, device) for _ in range(rounds) for way in ways]
        taken = _slowest(group, device, taken)
    own, serial = (1e3 * statistics.median(taken[i::2]) for i in range(2))
    return own, serial


def _way(layer: Layer, seen: Seen, x: Tensor, weights: list[Tensor]) -> Callable[[], object]:
    return lambda: call(layer, seen.operator, x, weights, seen.whole)


def _data(layer: Layer, seen: Seen) -> tuple[Tensor, list[Tensor]]:
    """Return x and weights as a call had them, drawn without touching torch's own generator.

    Raises:
        MemoryError: some rank has no memory for them; on all ranks.
    """
    why = None
    try:
        drawn = torch.Generator(seen.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=drawn, dtype=seen.dtype, device=seen.device)

        x = normal(seen.rows // seen.inner, seen.inner, seen.k)
        weights = [normal(width, seen.k).requires_grad_(seen.recorded) for width in seen.widths]
    except (RuntimeError, MemoryError) as error:  # torch has no class of its own for a full host
        why = str(error)
    reasons = groups.gathered(layer.ranks.group, seen.device, why)
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise MemoryError(
                f"measure=True: rank {rank} of the group cannot make the data of a call of "
                f"{layer.name}: {reason}; free memory, or explain without measure"
            )
    return x, weights


def _turn(way: Callable[[], object], calls: int, group: Any, device: torch.device) -> float:
    """Return the seconds of one of so many calls, made one after another once all ranks came."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    if device.type == "cpu":
        begun = time.perf_counter()
        for _ in range(calls):
            way()
        return (time.perf_counter() - begun) / calls
    gpus: Any = torch.cuda
    begin, end = (gpus.Event(enable_timing=True) for _ in range(2))
    gpus.synchronize(device)
    begin.record()
    for _ in range(calls):
        way()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls


def _slowest(group: Any, device: torch.device, seconds: Sequence[float]) -> list[float]:
    """Return the largest of each time over all ranks."""
    ranks = groups.gathered(group, device, list(seconds))
    return [max(each) for each in zip(*ranks, strict=True)]


@contextmanager
def _modes(seen: Seen) -> Iterator[None]:
    """Be on the device of a call, in its mode of gradients, and in no other."""
    with ExitStack() as modes:
        modes.enter_context(_device_of(seen))
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.set_grad_enabled(seen.recorded))
        modes.enter_context(torch.autocast(seen.device.type, enabled=False))
        yield


def _device_of(seen: Seen | None) -> Any:
    """Return a context in which the GPU of a call, if it was on one, is the current one."""
    on_gpu = seen is not None and seen.device.type == "cuda"
    return torch.cuda.device(seen.device) if seen and on_gpu else nullcontext()
