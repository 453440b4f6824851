"""What the plugins of vLLM and SGLang share: the numbers of tokens that gain, windows, equal ranks.

A server's ranks run equal releases and settings, and the calls of a layer have equal sizes on all
ranks. Everything here depends on these only, so all ranks choose the same.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import ficco
from ficco.api import groups
from ficco.api.auto import AUTO, LIMITED
from ficco.api.layers.choosing import choice_of
from ficco.api.layers.layer import ATTRIBUTE, Layer, Left, Options, Ranks, Seen
from ficco.api.sizing import reserve
from ficco.core.errors import InputError, bytes_text, counted
from ficco.core.logs import log
from ficco.core.private.frameworks import Framework, release_of, why_unusable
from ficco.core.settings import switch

Module = torch.nn.Module
Tensor = torch.Tensor


def is_wanted(flag: str, framework: Framework) -> bool:
    """Return whether a plugin is to change its framework.

    If the framework is too old, or lacks a name that is needed, the log says so.

    Raises:
        InputError: the flag is neither 0 nor 1.
    """
    if not switch(flag, False):
        return False
    if why := why_unusable(framework):
        log.warning("%s=1 has no effect, %s is unchanged: %s", flag, framework.name, why)
    return not why


def announce(flag: str, package: str) -> None:
    """Tell the other ranks this rank's setting and releases; no rank waits.

    Call it before ranks meet for the first time, and `check_equal` after they have met.
    """
    facts = {flag: "1", "ficco": ficco.__version__, package: release_of(package)}
    _store().set(_key(flag, dist.get_rank()), json.dumps(facts))


def check_equal(flag: str, ranks: Iterable[int]) -> None:
    """Check that the ranks which meet have announced what this rank has.

    Raises:
        InputError: a rank has another setting or release; the message names both ranks.
    """
    store, own = _store(), dist.get_rank()
    mine = json.loads(store.get(_key(flag, own)))
    for rank in ranks:
        if not store.check([_key(flag, rank)]):
            raise InputError(
                f"{flag}=1 on rank {own}, but not on rank {rank}: set it on all ranks or on none, "
                "with ficco installed for all"
            )
        theirs = json.loads(store.get(_key(flag, rank)))
        if theirs != mine:
            raise InputError(f"rank {own} has {_words(mine)}; rank {rank} has {_words(theirs)}")


def _store() -> Any:
    everyone: Any = dist.group.WORLD
    return everyone.get_group_store()


def _key(flag: str, rank: int) -> str:
    return f"ficco/{flag}/{rank}"


def _words(facts: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def row_layer(name: str, module: Module, group: Any, **facts: Any) -> Layer:
    """Return the Layer of a row-parallel module; `facts` are further ones of a Layer."""
    return _layer(name, module, "row", group, **facts)


def column_layer(name: str, module: Module, group: Any) -> Layer:
    """Return the Layer of a column-parallel module whose input is split by rows."""
    return _layer(name, module, "column", group, input_dim=0, gathers=True)


def _layer(name: str, module: Module, kind: str, group: Any, **facts: Any) -> Layer:
    options = Options(AUTO, save_gathered=False, contiguous=False)
    return Layer(name, type(module).__name__, kind, ranks=Ranks(group), options=options, **facts)


def attach_layers(
    model: Module, look: Callable[[str, Module], Layer | Left | None], tokens: int, kept: int
) -> tuple[int, list[Left]]:
    """Attach Layers to the modules of a model that gain, and size windows for them.

    A collective call of the layers' group.

    Args:
        model: with its weights on their device.
        look: returns a Layer, or why a module is left; None for other modules.
        tokens: of the largest call.
        kept: calls of so many tokens or fewer are the framework's in any case.

    Returns:
        The least number of tokens of an overlapped call, 0 if none is; the layers that are left.
    """
    found = [(module, look(name, module)) for name, module in model.named_modules()]
    taken = [(module, layer) for module, layer in found if isinstance(layer, Layer)]
    left = [each for _, each in found if isinstance(each, Left)]
    closed = _why_closed(taken[0][1].ranks.group, taken[0][0].weight.device) if taken else ""
    least, gains = 0, dict[Any, int]()
    for module, layer in taken:
        weight: Any = module.weight
        kind = (layer.operator, weight.shape)
        if not closed and kind not in gains:
            gains[kind] = max(kept + 1, _least_rows(layer, weight, tokens))
        if closed or gains[kind] > tokens:
            why = closed or f"none of its calls of up to {tokens} tokens gains, or fits the limit"
            left.append(Left(layer.name, layer.style, why))
        else:
            least = max(least, gains[kind])
            setattr(module, ATTRIBUTE, layer)
    if least:
        with torch.no_grad():
            reserved = reserve(model, tokens, backward=False)
        log.info("windows for calls of up to %d tokens take %s", tokens, bytes_text(reserved))
    return least, left


def _why_closed(group: Any, device: torch.device) -> str:
    """Open a group for a device; return why its calls cannot overlap, or an empty string."""
    if groups.disabled():
        return "FICCO_DISABLE=1"
    if device.type == "cuda":
        groups.gpu_runtime(group, device)
    else:
        groups.runtime(group)
    return groups.plain_reason(group, device.type == "cuda") or ""


def _least_rows(layer: Layer, weight: Tensor, most: int) -> int:
    """Return the least number of rows from which the rule overlaps calls up to `most`.

    It halves the rows while the rule's schedule overlaps. Kernels for few rows do not count: the
    rule compares them with NCCL, and serving frameworks have kernels of their own for such sums.
    """
    (n, k), rows, least = weight.shape, most, most + 1
    while rows:
        own = -(-rows // layer.ranks.world) if layer.gathers else rows
        seen = Seen(layer.operator, own, k, (n,), weight.dtype, weight.device, rows, 1, False)
        choice = choice_of(replace(layer, seen=seen), "eager")
        chosen = None if choice is None else choice.schedule
        if choice is not None and choice.reasons == (LIMITED,):  # fewer rows may fit
            rows //= 2
            continue
        if chosen is None or chosen.name == "serial" or chosen.for_few_rows:
            break
        least, rows = rows, rows // 2
    return least


def log_layers(framework: str, layers: int, least: int, tokens: int, left: Sequence[Left]) -> None:
    """Log once which layers overlap, and why others do not."""
    said = f"{framework}: {layers - len(left)} of {counted(layers, 'parallel layer')} overlap"
    if least:
        said += f" the GEMM with its communication, in calls of {least} to {tokens} tokens"
    for why, count in Counter(each.why for each in left).items():
        first = next(each.name for each in left if each.why == why)
        said += f"; {count} left ({first}{', ...' if count > 1 else ''}): {why}"
    log.info("%s", said)
