"""Layers of one parent that read the same input share one call: q, k and v; gate and up.

The first of them that is called computes for all; the others take theirs if they get the very same
tensor, unchanged, in the same modes and with unchanged weights. One that does not is computed
alone, and leaves the others from the next forward on. Results wait at most until the parent's
forward ends; of layers that are called otherwise, by another method of the parent, each computes
alone. What is written and PyTorch does not count, through `.data` or by a collective, is not seen.

A checkpoint's second run of a forward must do what the first did. So who shares changes only
outside of backward, where such runs happen. They share if the last forward there did, also where
the parent's hooks do not run with them, and if they do.

torch.compile cannot compare how often a tensor was written. What it traces shares where a forward
that was not compiled has shown, in the same mode (train or eval), that all layers take theirs; the
code that is traced is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ficco.private.torch_layers import (
    buffers_of,
    current_graph_task,
    graph_tasks_are_known,
    local_part,
    parameters_of,
    version_of,
    versions_are_known,
)

__all__ = ["Sharing"]

Tensor = torch.Tensor
Module = torch.nn.Module
Compute = Callable[[Sequence[Module], Any], list[Any]]

_APART = "it was not called with the input that the others read"
_UNTOLD = (
    "this release of PyTorch does not tell whether a backward pass runs, or a tensor was written"
)
_MADE = "its {} is made anew whenever it is read (parametrized)"


class _Kept(NamedTuple):
    """A result that waits for its layer, and what it was computed with."""

    result: Any
    facts: tuple[Any, ...]


class Sharing:
    """The layers of one parent that read one input; each has its place among them.

    Lists by place, not dictionaries by module: torch.compile follows them.

    Attributes:
        parent: its name.
        layers: its layers.
        alone: by place: why a layer was found not to share, for good; None: it was not.
        unsteady: by place: why its weight cannot be relied on in this forward of the parent.
        uncounted: the last call was on an inference tensor, for which nothing is shared.
        outside: the last call came from no forward of the parent, and nothing was shared.
        proven: whether, in a forward that was not compiled, all that share took the same tensor,
            unchanged; of a parent in eval mode, and in train mode.
    """

    def __init__(self, parent: str, layers: Sequence[Module]) -> None:
        self.parent = parent
        self.layers = list(layers)
        told = graph_tasks_are_known and versions_are_known
        self.alone: list[str | None] = [None if told else _UNTOLD for _ in layers]
        self.unsteady = [_unsteady(layer) for layer in layers]
        self.uncounted = self.outside = False
        self.proven = [False, False]
        self._release: list[str | None] = [None for _ in layers]
        self._changes = False  # whether someone is leaving
        self._inside = False  # whether a forward of the parent runs
        self._mode = 0  # 1: the parent trains
        self._shared = False  # whether it ran at the last call outside of backward
        self._kept: list[_Kept | None] = [None for _ in layers]
        self._x: Any = None  # of which results wait
        self._facts: tuple[Any, ...] = ()

    def result(self, place: int, x: Any, compute: Compute) -> Any:
        """Return the result of one layer; `compute` makes those of several from x."""
        if not _within_backward():
            self._shared = self._inside
            if self._changes:
                pairs = zip(self.alone, self._release, strict=True)
                self.alone = [old or new for old, new in pairs]
                self._release, self._changes = [None for _ in self.layers], False
        mine, modes = self.layers[place], _modes(x)
        unknown = torch.compiler.is_compiling() and not self.proven[self._mode]
        self.uncounted = modes is None
        self.outside = not (self._inside or self._shared)
        if self.why_apart(place) or self.outside or modes is None or unknown:
            return compute([mine], x)[0]
        if self._x is x and self._facts == modes:
            kept = self._kept[place]
            self._kept[place] = None
            if all(each is None for each in self._kept):
                self._x = None
            if kept is None or kept.facts != _weights(mine):
                return compute([mine], x)[0]
            if self._x is None and not torch.compiler.is_compiling():
                self.proven[self._mode] = True
            return kept.result
        self._drop()
        together = [
            i
            for i, layer in enumerate(self.layers)
            if not self.why_apart(i) and (i == place or _alike(layer, mine))
        ]
        results = compute([self.layers[i] for i in together], x)
        for i, result in zip(together, results, strict=True):
            if i == place:
                own = result
            else:
                self._kept[i] = _Kept(result, _weights(self.layers[i]))
                self._x, self._facts = x, modes
        return own

    def why_apart(self, place: int) -> str | None:
        """Return why a layer does not share, or None."""
        return self.alone[place] or self.unsteady[place]

    def members(self) -> list[Module]:
        """Return the layers that share, so far as is known."""
        return [layer for i, layer in enumerate(self.layers) if not self.why_apart(i)]

    def begin(self, parent: Module, inputs: Any) -> None:
        """Begin a forward of the parent."""
        self._inside, self._mode = True, int(parent.training)
        if torch.compiler.is_compiling() or _within_backward():
            return
        self.unsteady = [_unsteady(layer) for layer in self.layers]

    def settle(self, parent: Module, inputs: Any, output: Any) -> None:
        """End a forward of the parent: a layer whose result still waits is not like the others."""
        for i, kept in enumerate(self._kept):
            if kept is not None:
                self._release[i], self._changes = _APART, True
        self.clear(parent, inputs, output)

    def clear(self, parent: Module, inputs: Any, output: Any) -> None:
        """Forget what waits; also where the parent's forward has raised."""
        self._inside = False
        self._drop()

    def _drop(self) -> None:
        self._x, self._facts = None, ()
        self._kept = [None for _ in self.layers]


def _within_backward() -> bool:
    return not torch.compiler.is_compiling() and current_graph_task() != -1


def _modes(x: Tensor) -> tuple[Any, ...] | None:
    """Return x's version and the modes that a result depends on.

    None: inference tensors do not count their versions, so nothing says that x is unchanged.
    """
    kind = x.device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if torch.compiler.is_compiling():
        return None, torch.is_grad_enabled(), cast
    local = local_part(x)  # of a DTensor, whose own version stays
    if x.is_inference() or local.is_inference():
        return None
    return version_of(x), version_of(local), torch.is_grad_enabled(), cast


def _weights(layer: Module) -> tuple[Any, ...]:
    """Return which weights a layer has, where they lie, and how often they were written."""
    if torch.compiler.is_compiling():
        return ()
    found: list[Any] = []
    for tensor in (layer.weight, layer.bias):
        if isinstance(tensor, Tensor):
            local = local_part(tensor)
            plain = type(local) in (Tensor, torch.nn.Parameter) and not local.is_meta
            found += [id(tensor), None if tensor.is_inference() else version_of(tensor)]
            found.append(local.data_ptr() if plain else None)
    return tuple(found)


def _unsteady(layer: Module) -> str | None:
    """Say why a layer's weight cannot tell whether it is another later, or nothing.

    By what ranks have in common: one that alone made a call apart would part the ranks.
    """
    held = parameters_of(layer).keys() | layer.__dict__.keys() | buffers_of(layer).keys()
    for name in ("weight", "bias"):
        if name not in held and getattr(layer, name, None) is not None:
            return _MADE.format(name)
    return None


def _alike(one: Module, other: Module) -> bool:
    """Whether two layers can be one call now.

    A weight that is still split elsewhere, or whose memory is still to come, cannot.
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
