"""Layers of one parent that read the same input share one call: q, k and v; gate and up.

The first of them that is called computes for all; the others take theirs if they get the very same
tensor, unchanged, in the same modes and with unchanged weights. One that does not is computed
alone, and leaves the others from the next forward on. Results wait at most until the parent's
forward ends.

A checkpoint's second run of a forward must do what the first did. So who shares changes only
outside of backward, where such runs happen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Sharing"]

Tensor = torch.Tensor
Module = torch.nn.Module
Compute = Callable[[Sequence[Module], Any], list[Any]]


class _Kept(NamedTuple):
    """A result that waits for its layer, and what it was computed with."""

    result: Any
    facts: tuple[Any, ...]


class Sharing:
    """The layers of one parent that read one input.

    Attributes:
        parent: its name.
        alone: layers that were found not to share, by module, and why.
    """

    def __init__(self, parent: str, members: Sequence[Module]) -> None:
        self.parent = parent
        self.alone: dict[Module, str] = {}
        self._members = list(members)
        self._leaving: dict[Module, str] = {}
        self._served: set[Module] = set()  # in this forward of the parent
        self._x: Any = None
        self._facts: tuple[Any, ...] = ()
        self._kept: dict[Module, _Kept] = {}

    @property
    def members(self) -> list[Module]:
        """The layers that still share."""
        gone = self.alone.keys() | self._leaving.keys()
        return [member for member in self._members if member not in gone]

    def result(self, module: Module, x: Any, compute: Compute) -> Any:
        """Return the result of one layer; `compute` makes those of several from x."""
        if self._leaving and torch._C._current_graph_task_id() == -1:  # not within a backward
            self.alone |= self._leaving
            self._leaving = {}
        if module in self.alone or _version(x) is None:
            return compute([module], x)[0]
        self._served.add(module)
        if self._x is x and self._facts == _modes(x):
            kept = self._kept.pop(module, None)
            if not self._kept:
                self._x = None
            if kept is None or kept.facts != _weights(module):
                return compute([module], x)[0]
            return kept.result
        self._drop()
        together = [m for m in self._members if m not in self.alone and _alike(m, module)]
        modes = _modes(x)
        results = compute(together, x)
        for member, result in zip(together, results, strict=True):
            if member is module:
                mine = result
            else:
                self._kept[member] = _Kept(result, _weights(member))
        if self._kept:
            self._x, self._facts = x, modes
        return mine

    def settle(self, parent: Module, inputs: Any, output: Any) -> None:
        """End a forward of the parent: layers that took nothing in it are not like the others."""
        for member in self._kept:
            if member not in self._served:
                self._leaving[member] = "it was not called with the input that the others read"
        self.clear(parent, inputs, output)

    def clear(self, parent: Module, inputs: Any, output: Any) -> None:
        """Forget what waits; also where the parent's forward has raised."""
        self._served.clear()
        self._drop()

    def _drop(self) -> None:
        self._x, self._facts = None, ()
        self._kept.clear()


def _version(x: Tensor) -> int | None:
    """Return how often x was written; None for inference tensors, which do not count it."""
    return None if x.is_inference() else x._version


def _modes(x: Tensor) -> tuple[Any, ...]:
    """Return x's version, and the modes that a result depends on."""
    kind = x.device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return _version(x), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast


def _weights(module: Module) -> tuple[Any, ...]:
    """Return which weights a layer has, and how often they were written."""
    weight, bias = module.weight, module.bias
    return (
        id(weight),
        _version(weight),  # type: ignore[arg-type]
        id(bias),
        None if bias is None else _version(bias),  # type: ignore[arg-type]
    )


def _alike(one: Module, other: Module) -> bool:
    """Whether two layers can be one call now; a weight that is still split elsewhere cannot."""
    a, b = one.weight, other.weight
    return a is b or (
        type(a) is type(b)
        and a.dtype == b.dtype
        and a.device == b.device
        and getattr(a, "placements", None) == getattr(b, "placements", None)
        and getattr(a, "device_mesh", None) == getattr(b, "device_mesh", None)
    )
