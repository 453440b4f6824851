"""Time the calls of a model's layers on this machine, and the same calls by `serial`.

Every kind of call runs on its own data, equally often on all ranks, so all ranks get the same
figures. `unmeasured` says why a call is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ficco.api import groups
from ficco.api.layers.choosing import runtime_of, schedule_of
from ficco.api.layers.layer import Layer, Measured, Seen
from ficco.api.turns import Turns
from ficco.core.errors import InputError
from ficco.engine.compute.torch_dtypes import PROBLEM_NAME_OF
from ficco.plan.schedule import Schedule

BUDGET_S = 0.25  # for the rounds of one kind of call

_WHAT = "time layers"  # the purpose of exchanges

Tensor = torch.Tensor


def measure(layers: Sequence[Layer]) -> None:
    """Time the forward of every kind of call that layers made last; store figures in the layers.

    A collective call: all ranks of the layers' groups make it with the same layers.

    Raises:
        InputError: a CUDA graph is being captured, or ranks of a group made different calls.
        MemoryError: some rank had no memory for the data of a call.
    """
    gpus: Any = torch.cuda
    if gpus.is_initialized() and gpus.is_current_stream_capturing():
        raise InputError(
            "measure=True while a CUDA graph is captured, which would capture the timed calls; "
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
                timing = Measured(schedule, *_times(same[0], seen), paced)
                for layer in same:
                    layer.measured[seen] = timing


def unmeasured(layer: Layer) -> str | None:
    """Return why a layer's last call is not timed; None if it is."""
    return next(_reasons(layer), None)


def _reasons(layer: Layer) -> Iterator[str]:
    """Yield the reasons why a layer's last call is not timed, the most general first."""
    seen = layer.seen
    if groups.disabled():
        yield "FICCO_DISABLE turns it into plain torch.distributed"
    if layer.ranks.world == 1:
        yield "nothing is sent in a group of one rank"
    if seen is None:
        yield "no call was seen (torch.compile hides calls); call the model first"
        return
    if groups.plain_reason(layer.ranks.group, seen.device.type == "cuda"):
        yield "its group runs plain torch.distributed"
    if seen.operator == "column_matmul":
        yield "its forward sends nothing"
    if seen.dtype not in PROBLEM_NAME_OF or 0 in (seen.whole, seen.inner, seen.k, *seen.widths):
        yield f"its last call had nothing to multiply, or {seen.dtype}"
    if runtime_of(layer) is None:
        yield "its group was closed after its last call; call the model again"
    if _is_serial(schedule_of(layer)):
        yield "it runs serial"


def _is_serial(schedule: Schedule | None) -> bool:
    """Return whether a whole transfer and a whole GEMM run one after another."""
    if schedule is None or schedule.transport == "collective":
        return True
    return schedule.compute == "whole" and not schedule.moves


def _kinds(group: Any, layers: Sequence[Layer]) -> list[list[Layer]]:
    """Return the timed layers, grouped by equal calls on every rank.

    Raises:
        InputError: the ranks' calls differ; raised on all ranks.
    """
    reasons = [unmeasured(layer) for layer in layers]
    own = [_facts(layer, why) for layer, why in zip(layers, reasons, strict=True)]
    seen = next((layer.seen for layer in layers if layer.seen), None)
    device = torch.device("cpu") if seen is None else seen.device
    with _device_of(seen):
        by_rank = groups.gathered(group, device, _WHAT, own)
    counts = [len(facts) for facts in by_rank]
    if len(set(counts)) > 1:
        raise InputError(
            f"measure=True: the ranks of a group pass {counts} of its layers; pass the same part "
            "of the model on all of them"
        )
    kinds: dict[Any, list[Layer]] = {}
    for layer, why, calls in zip(layers, reasons, zip(*by_rank, strict=True), strict=True):
        for rank, facts in enumerate(calls):
            if facts[:2] != calls[0][:2]:
                raise InputError(
                    f"measure=True: rank 0 of a group has {' '.join(calls[0][:2])}; rank {rank} "
                    f"has {' '.join(facts[:2])}; first call the model in the same way on all ranks"
                )
        if why is None:
            key = layer.options, tuple(facts[1:] for facts in calls)
            kinds.setdefault(key, []).append(layer)
    return list(kinds.values())


def _facts(layer: Layer, why: str | None) -> tuple[str, str, tuple[Any, ...]]:
    """Return a layer's name, its call's facts that are equal on all ranks, and this rank's."""
    seen, schedule = layer.seen, None if why is not None else schedule_of(layer)
    if seen is None or schedule is None:
        return layer.name, f"that is not timed, because {why}", ()
    size = f"k={seen.k}" if seen.operator == "all_gather_matmul" else f"n={seen.widths[0]}"
    common = (
        f"called as {seen.operator} with {seen.whole} x {seen.inner} rows, {size}, {seen.dtype} on "
        f"{seen.device.type}, {schedule.name} with grain {schedule.grain_text}, "
        f"{'with' if seen.recorded else 'without'} gradients"
    )
    return layer.name, common, (seen.k, seen.widths)


def _times(layer: Layer, seen: Seen) -> tuple[float, float]:
    """Return the milliseconds of a call by the layer's own schedule, and by serial."""
    plain = replace(layer, options=replace(layer.options, schedule="serial"))
    with _modes(seen):
        x, weights = _data(layer, seen)
        runs = [_run_of(variant, seen, x, weights) for variant in (replace(layer), plain)]
        runtime = runtime_of(layer)
        turns = Turns(runtime, seen.device, f"It times calls of {layer.name}.")
        own, serial = turns.ms_by_regime(runs, BUDGET_S, eager_alone=True)["eager"]
    return own, serial


def _run_of(layer: Layer, seen: Seen, x: Tensor, weights: list[Tensor]) -> Callable[[], object]:
    return lambda: layer.call(seen.operator, x, weights, seen.whole)


def _data(layer: Layer, seen: Seen) -> tuple[Tensor, list[Tensor]]:
    """Return random x and weights of a call's shapes, without using torch's default generator.

    Raises:
        MemoryError: some rank has no memory for them; raised on all ranks.
    """
    why = None
    try:
        generator = torch.Generator(seen.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=seen.dtype, device=seen.device)

        x = normal(seen.rows // seen.inner, seen.inner, seen.k)
        weights = [normal(width, seen.k).requires_grad_(seen.recorded) for width in seen.widths]
    except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError if the host is full
        why = str(error)
    reasons = groups.gathered(layer.ranks.group, seen.device, _WHAT, why)
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise MemoryError(
                f"measure=True: rank {rank} of the group cannot make the data of a call of "
                f"{layer.name}: {reason}; free memory, or explain without measure"
            )
    return x, weights


@contextmanager
def _modes(seen: Seen) -> Iterator[None]:
    """Enter the device and the gradient mode of a call, without inference mode or autocast."""
    with ExitStack() as modes:
        modes.enter_context(_device_of(seen))
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.set_grad_enabled(seen.recorded))
        modes.enter_context(torch.autocast(seen.device.type, enabled=False))
        yield


def _device_of(seen: Seen | None) -> Any:
    """Return a context that makes the GPU of a call current, if the call ran on a GPU."""
    on_gpu = seen is not None and seen.device.type == "cuda"
    return torch.cuda.device(seen.device) if seen and on_gpu else nullcontext()
