"""Share one call between layers of one parent that read the same input: q, k and v; gate and up.

The first layer that is called computes the results of all. Another layer takes its result if it
gets the same tensor, unchanged, in the same modes and with unchanged weights. Otherwise it is
computed alone, and no longer shares from the next forward on. Results wait at most until the
parent's forward ends. Layers that another method of the parent calls are each computed alone.
Writes that PyTorch does not count, through `.data` or by a collective, are not detected.

Activation checkpointing reruns a forward during backward, and the second run must do the same as
the first. The set of sharing layers therefore changes only outside of backward. A rerun shares if
the last forward outside of backward did, whether or not the parent's hooks run.

torch.compile cannot compare how often a tensor was written. Traced code shares if a forward that
was not compiled has shown, in the same mode (train or eval), that all layers take their results;
the traced code is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ficco.core.private.torch_core import version_of, versions_are_known
from ficco.core.private.torch_layers import (
    buffers_of,
    current_graph_task,
    graph_tasks_are_known,
    local_part,
    parameters_of,
)

Tensor = torch.Tensor
Module = torch.nn.Module
Compute = Callable[[Sequence[Module], Any], list[Any]]

_OTHER_INPUT = "it was not called with the input that the others read"
_UNSUPPORTED = (
    "this release of PyTorch does not show whether a backward runs, or a tensor was written"
)
_PARAMETRIZED = "its {} is recomputed at every read (parametrized)"


class _Waiting(NamedTuple):
    """A result that waits for its layer, and the facts about the weights that made it."""

    result: Any
    facts: tuple[Any, ...]


class Sharing:
    """The layers of one parent that read one input; each has an index, its place.

    State is in lists by place, not in dictionaries by module, because torch.compile traces lists.

    Attributes:
        parent: the parent's name.
        layers: the layers.
        alone: by place: why a layer never shares; None: it may share.
        unsteady: by place: why a layer's weight may change within this forward of the parent.
        uncounted: the last call was on an inference tensor, so nothing was shared.
        outside: the last call was outside a forward of the parent, so nothing was shared.
        proven: whether, in a forward that was not compiled, all sharing layers took the same
            tensor, unchanged; for a parent in eval mode, and in train mode.
    """

    def __init__(self, parent: str, layers: Sequence[Module]) -> None:
        self.parent = parent
        self.layers = list(layers)
        supported = graph_tasks_are_known and versions_are_known
        self.alone: list[str | None] = [None if supported else _UNSUPPORTED for _ in layers]
        self.unsteady = [_why_unsteady(layer) for layer in layers]
        self.uncounted = self.outside = False
        self.proven = [False, False]
        self._leaving: list[str | None] = [None for _ in layers]
        self._is_leaving = False  # whether a layer stops sharing at the next forward
        self._inside = False  # whether a forward of the parent runs
        self._mode = 0  # 1: the parent is in training mode
        self._shared = False  # whether `_inside` was true at the last call outside of backward
        self._waiting: list[_Waiting | None] = [None for _ in layers]
        self._x: Any = None  # the input of the waiting results
        self._facts: tuple[Any, ...] = ()  # and its modes

    def result(self, layer: Module, place: int, x: Any, compute: Compute) -> Any:
        """Return the result of one layer; `compute` computes several layers from x.

        A shallow copy of a layer has its place, but other weights. It is computed alone.
        """
        if layer is not self.layers[place]:
            return compute([layer], x)[0]
        if not _within_backward():
            self._shared = self._inside
            if self._is_leaving:
                pairs = zip(self.alone, self._leaving, strict=True)
                self.alone = [old or new for old, new in pairs]
                self._leaving, self._is_leaving = [None for _ in self.layers], False
        modes = _modes(x)
        unknown = torch.compiler.is_compiling() and not self.proven[self._mode]
        self.uncounted = modes is None
        self.outside = not (self._inside or self._shared)
        if self.why_apart(place) or self.outside or modes is None or unknown:
            return compute([layer], x)[0]
        if self._x is x and self._facts == modes:
            waiting = self._waiting[place]
            self._waiting[place] = None
            if all(other is None for other in self._waiting):
                self._x = None
            if waiting is None or waiting.facts != _weight_facts(layer):
                return compute([layer], x)[0]
            if self._x is None and not torch.compiler.is_compiling():
                self.proven[self._mode] = True
            return waiting.result
        self._drop()
        together = [
            i
            for i, other in enumerate(self.layers)
            if not self.why_apart(i) and (i == place or _can_share(other, layer))
        ]
        results = compute([self.layers[i] for i in together], x)
        for i, result in zip(together, results, strict=True):
            if i == place:
                own = result
            else:
                self._waiting[i] = _Waiting(result, _weight_facts(self.layers[i]))
                self._x, self._facts = x, modes
        return own

    def why_apart(self, place: int) -> str | None:
        """Return why a layer does not share, or None."""
        return self.alone[place] or self.unsteady[place]

    def members(self) -> list[Module]:
        """Return the layers that share, as far as is known."""
        return [layer for i, layer in enumerate(self.layers) if not self.why_apart(i)]

    def begin(self, parent: Module, inputs: Any) -> None:
        """Begin a forward of the parent."""
        self._inside, self._mode = True, int(parent.training)
        if torch.compiler.is_compiling() or _within_backward():
            return
        self.unsteady = [_why_unsteady(layer) for layer in self.layers]

    def settle(self, parent: Module, inputs: Any, output: Any) -> None:
        """End a forward of the parent: a layer whose result still waits read another input."""
        for i, waiting in enumerate(self._waiting):
            if waiting is not None:
                self._leaving[i], self._is_leaving = _OTHER_INPUT, True
        self.clear(parent, inputs, output)

    def clear(self, parent: Module, inputs: Any, output: Any) -> None:
        """Drop waiting results; runs also if the parent's forward has raised an error."""
        self._inside = False
        self._drop()

    def _drop(self) -> None:
        self._x, self._facts = None, ()
        self._waiting = [None for _ in self.layers]


def _within_backward() -> bool:
    return not torch.compiler.is_compiling() and current_graph_task() != -1


def _modes(x: Tensor) -> tuple[Any, ...] | None:
    """Return x's version and the modes that a result depends on.

    None: inference tensors have no version, so a change of x cannot be detected.
    """
    kind = x.device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if torch.compiler.is_compiling():
        return None, torch.is_grad_enabled(), cast
    local = local_part(x)  # the version of a DTensor itself does not change
    if x.is_inference() or local.is_inference():
        return None
    return version_of(x), version_of(local), torch.is_grad_enabled(), cast


def _weight_facts(layer: Module) -> tuple[Any, ...]:
    """Return the identities, addresses and versions of a layer's weights."""
    if torch.compiler.is_compiling():
        return ()
    facts: list[Any] = []
    for tensor in (layer.weight, layer.bias):
        if isinstance(tensor, Tensor):
            local = local_part(tensor)
            plain = type(local) in (Tensor, torch.nn.Parameter) and not local.is_meta
            facts += [id(tensor), None if tensor.is_inference() else version_of(tensor)]
            facts.append(local.data_ptr() if plain else None)
    return tuple(facts)


def _why_unsteady(layer: Module) -> str | None:
    """Return why a change of a layer's weight cannot be detected, or None.

    Only facts that are equal on all ranks count: otherwise the ranks would make different calls.
    """
    names = parameters_of(layer).keys() | layer.__dict__.keys() | buffers_of(layer).keys()
    for name in ("weight", "bias"):
        if name not in names and getattr(layer, name, None) is not None:
            return _PARAMETRIZED.format(name)
    return None


def _can_share(one: Module, other: Module) -> bool:
    """Return whether two layers can share one call now.

    They cannot if one weight is sharded differently, or has no memory yet.
    """
    a, b = one.weight, other.weight
    return a is b or (
        type(a) is type(b)
        and a.dtype == b.dtype
        and a.device == b.device
        and getattr(a, "placements", None) == getattr(b, "placements", None)
        and getattr(a, "device_mesh", None) == getattr(b, "device_mesh", None)
        and _is_empty(a) == _is_empty(b)
    )


def _is_empty(weight: Any) -> bool:
    return not local_part(weight).numel()
